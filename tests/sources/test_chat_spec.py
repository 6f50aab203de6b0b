import pytest

from dspark_store.sources.parts import build_blend
from dspark_store.sources.registry import SourceContext, SourceSpec, build_source
from dspark_store.sources.source import SourceError
from tests.sources.words import CHAT, word_tokenizer, write_rows


def ids(source, cursor=0):
    return [sample.input_ids.tolist() for sample in source.read(cursor)]


def context(**options):
    return SourceContext(**{"seq_length": 4, "shuffle_seed": None, **options})


@pytest.fixture
def tokens(tmp_path):
    rows = [{"input_ids": [row] * (row + 1)} for row in range(10)]
    return write_rows(tmp_path / "tokens.jsonl", *rows)


def test_conversations_are_built_by_name(tmp_path):
    path = write_rows(tmp_path / "chats.jsonl", *[{"messages": CHAT}] * 3)
    job = context(seq_length=24, load_tokenizer=word_tokenizer)
    assert len(ids(build_source(SourceSpec("chat", {"path": path}), job))) == 3


def test_conversations_need_a_tokenizer(tmp_path):
    path = write_rows(tmp_path / "chats.jsonl", {"messages": CHAT})
    with pytest.raises(SourceError, match="'chat' needs a tokenizer"):
        build_source(SourceSpec("chat", {"path": path}), context())


def test_options_of_the_source_win_over_those_of_the_job(tokens):
    job = context(split="train[:3]", over_long="drop")
    assert ids(build_source(SourceSpec("tokens", {"path": tokens}), job)) == [[0], [1, 1], [2, 2, 2]]
    options = {"path": tokens, "split": None, "over_long": "truncate", "min_supervised": 4}
    assert ids(build_source(SourceSpec("tokens", options), job)) == [[row] * 4 for row in range(3, 10)]


def test_an_option_of_another_type_is_refused(tokens):
    with pytest.raises(SourceError, match=r"'shuffle_seed' .* is 'x'; expected a whole number or none"):
        build_source(SourceSpec("tokens", {"path": tokens, "shuffle_seed": "x"}), context())


def test_a_blend_of_rows_that_are_split_goes_on_exactly(tokens):
    part = {"type": "tokens", "path": tokens, "over_long": "split"}
    blend = build_blend(context(), sources=[{"source": part}, {"source": {"type": "dummy", "samples": 4}}])
    whole = list(blend.read())
    assert sum(len(sample.input_ids) for sample in whole) == 55 + 4 * 4
    for number, sample in enumerate(whole, start=1):
        assert ids(blend, sample.cursor) == [later.input_ids.tolist() for later in whole[number:]]
