import json

import numpy as np
import pytest

from dspark_store.sources import ChatSource, Sample, Source, SourceError
from dspark_store.sources.parts import build_blend
from dspark_store.sources.registry import SourceContext, SourceSpec, build_source
from tests.sources.test_masks import bits
from tests.sources.words import CHAT, HEADER, HEADER_CHAT, PLAIN, TAGGED, open_chats, word_tokenizer, write_rows

ROW = {"messages": CHAT}


def numbered(count):
    return [{"messages": [{"role": "user", "content": f"w{index % 3 + 1} " * (index + 1)}]} for index in range(count)]


def source(path, template=PLAIN, seq_length=24, truncation_side="right", **options):
    tokenizer = word_tokenizer(template, truncation_side=truncation_side)
    return open_chats(path, tokenizer, seq_length=seq_length, **options)


def mask_of(path, **options):
    (sample,) = source(path, **options).read()
    assert len(sample.input_ids) == len(sample.loss_mask)
    return sample.loss_mask.tolist()


@pytest.fixture
def one_chat(tmp_path):
    return write_rows(tmp_path / "chats.jsonl", ROW)


def lengths(samples):
    return [len(sample.input_ids) for sample in samples]


def test_a_sample_has_its_true_length_and_no_padding(one_chat):
    chat: Source = source(one_chat)
    (sample,) = chat.read()
    assert sample.input_ids.dtype == np.int32
    assert sample.loss_mask.dtype == np.uint8
    assert sample.loss_mask.tolist() == bits("0*5 1*5 0*4 1*4")


@pytest.mark.parametrize(
    ("template", "seq_length", "expected"),
    [(PLAIN, 10, "0*5 1*5"), (PLAIN, 4, "0*4"), (TAGGED, 9, "0*7 1*2"), (TAGGED, 7, "0*7")],
)
def test_long_conversations_are_cut_and_kept_even_when_nothing_is_supervised(one_chat, template, seq_length, expected):
    assert mask_of(one_chat, template=template, seq_length=seq_length) == bits(expected)


@pytest.mark.parametrize(("template", "expected"), [(PLAIN, "1*2 0*4 1*4"), (TAGGED, "1*2 0*6 1*2")])
def test_the_left_side_is_cut_where_the_tokenizer_says_so(one_chat, template, expected):
    assert mask_of(one_chat, template=template, seq_length=10, truncation_side="left") == bits(expected)
    (whole,) = source(one_chat, template).read()
    (cut,) = source(one_chat, template, seq_length=10, truncation_side="left").read()
    assert cut.input_ids.tolist() == whole.input_ids[-10:].tolist()


@pytest.mark.parametrize(
    ("seq_length", "side", "expected"),
    [(24, "right", "0*7 1*2 0*5 1*2"), (8, "right", "0*7 1"), (8, "left", "1 0*5 1*2")],
)
def test_reasoning_is_found_before_the_cut(tmp_path, seq_length, side, expected):
    path = write_rows(tmp_path / "chats.jsonl", {"messages": HEADER_CHAT})
    options = {"template": HEADER, "seq_length": seq_length, "truncation_side": side, "mask_reasoning_content": True}
    assert mask_of(path, **options) == bits(expected)


def test_reading_goes_on_at_any_position(tmp_path):
    chat = source(write_rows(tmp_path / "chats.jsonl", *numbered(7)), shuffle_seed=3)
    every = lengths(chat.read())
    assert [lengths(chat.read(start)) for start in range(8)] == [every[start:] for start in range(8)]
    with pytest.raises(ValueError, match="cursor is 8; expected 0 to 7"):
        chat.read(8)


def test_rows_are_shuffled_then_sliced_then_counted(tmp_path):
    path = write_rows(tmp_path / "chats.jsonl", *numbered(10))
    chat = source(path, split="train[2:8]", shuffle_seed=42, max_samples=3)
    assert len(chat) == 3
    assert lengths(chat.read()) == [row + 4 for row in (0, 7, 3)]


def test_the_identity_is_by_content_and_not_by_path(tmp_path):
    one, copy = (write_rows(tmp_path / name, ROW) for name in ("a.jsonl", "b.jsonl"))
    other = write_rows(tmp_path / "c.jsonl", ROW, ROW)
    assert source(one).identity() == source(copy).identity() != source(other).identity()
    assert "a.jsonl" not in json.dumps(source(one).identity())


@pytest.mark.parametrize(
    "options",
    [
        {"split": "train[:1]"},
        {"shuffle_seed": 0},
        {"max_samples": 1},
        {"mask_reasoning_content": True},
        {"truncation_side": "left"},
    ],
)
def test_every_option_that_decides_samples_is_in_the_identity(one_chat, options):
    assert source(one_chat, **options).identity() != source(one_chat).identity()


def test_a_bad_row_is_an_error_when_it_is_read(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n\n[]\n")
    samples = source(path).read()
    next(samples)
    with pytest.raises(SourceError, match=r"chats\.jsonl, line 3: the row is a JSON list"):
        next(samples)


def test_a_conversation_that_renders_to_nothing_is_an_error(one_chat):
    with pytest.raises(SourceError, match="line 1: the row has no tokens"):
        next(source(one_chat, "{% if false %}{% endif %}").read())


@pytest.mark.parametrize(
    ("template", "message"), [(None, "no chat template"), ("{% for m in messages %}", "not valid Jinja")]
)
def test_a_template_that_cannot_be_used_is_refused_at_once(one_chat, template, message):
    with pytest.raises(SourceError, match=message):
        source(one_chat, template)


def test_named_templates_are_chosen_by_the_tools(tmp_path):
    rows = [ROW, {**ROW, "tools": [{"name": "t"}]}]
    tokenizer = word_tokenizer()
    tokenizer.chat_template = {"default": PLAIN, "tool_use": TAGGED}
    chat = ChatSource(write_rows(tmp_path / "chats.jsonl", *rows), tokenizer, seq_length=24)
    assert [sample.loss_mask.sum() for sample in chat.read()] == [9, 5]


def test_workers_give_the_same_samples_and_the_same_error(tmp_path):
    path = write_rows(tmp_path / "chats.jsonl", *numbered(150), {}, ROW, {}, *numbered(30))
    options = {"shuffle_seed": 1, "on_bad_row": "skip", "max_refused": 0.006, "seq_length": 40, "over_long": "split"}
    here, there = source(path, **options), source(path, **options, num_workers=2)
    expected: list[Sample] = []
    samples: list[Sample] = []
    with pytest.raises(SourceError) as error:
        expected.extend(here.read())
    with pytest.raises(SourceError) as other:
        samples.extend(there.read())
    assert "with it 2 rows cannot be used" in str(error.value)
    assert str(error.value) == str(other.value)
    assert here.report() == there.report()
    assert len(samples) == len(expected) > 0
    for sample, same in zip(samples, expected, strict=True):
        assert sample.input_ids.tolist() == same.input_ids.tolist()
        assert sample.loss_mask.tolist() == same.loss_mask.tolist()
        assert sample.cursor == same.cursor


def test_a_date_that_no_row_asks_for_is_warned_of(one_chat, caplog):
    assert source(one_chat, template_date="2025-01-09").template_date is None
    assert "template_date 2025-01-09 changes nothing" in caplog.text


def ids(source, cursor=0):
    return [sample.input_ids.tolist() for sample in source.read(cursor)]


def context(**options):
    return SourceContext(**{"seq_length": 4, "shuffle_seed": None, **options})


@pytest.fixture
def tokens(tmp_path):
    rows = [{"input_ids": [row] * (row + 1)} for row in range(10)]
    return write_rows(tmp_path / "tokens.jsonl", *rows)


def test_options_of_the_source_win_over_those_of_the_job(tokens):
    job = context(split="train[:3]", over_long="drop")
    assert ids(build_source(SourceSpec("tokens", {"path": tokens}), job)) == [[0], [1, 1], [2, 2, 2]]
    options = {"path": tokens, "split": None, "over_long": "truncate", "min_supervised": 4}
    assert ids(build_source(SourceSpec("tokens", options), job)) == [[row] * 4 for row in range(3, 10)]


def test_a_blend_of_rows_that_are_split_goes_on_exactly(tokens):
    part = {"type": "tokens", "path": tokens, "over_long": "split"}
    blend = build_blend(context(), sources=[{"source": part}, {"source": {"type": "dummy", "samples": 4}}])
    whole = list(blend.read())
    assert sum(len(sample.input_ids) for sample in whole) == 55 + 4 * 4
    for number, sample in enumerate(whole, start=1):
        assert ids(blend, sample.cursor) == [later.input_ids.tolist() for later in whole[number:]]
