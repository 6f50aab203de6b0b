"""What a job says beforehand of every kind of source is what its store has."""

import re

import pytest

from dspark_store import open_cache
from dspark_store.precompute import tokenise as tokenise_module
from dspark_store.precompute.__main__ import main
from dspark_store.sources import ChatSource
from dspark_store.sources.megatron import write_samples
from dspark_store.writers.tokens import write_token_shard
from tests.precompute.jobs import arguments, interrupt, precompute, refused
from tests.tiny import VOCAB_SIZE, tiny_tokenizer

LENGTH = 64
DUMMY = "{type: dummy, samples: 5, max_length: 9, min_length: 9}"


@pytest.fixture(scope="module")
def corpus(chats, tmp_path_factory):
    """The tokens of each conversation and how many of them are supervised, uncut, and the corpus in three forms."""
    folder = tmp_path_factory.mktemp("corpus")
    whole = list(ChatSource(chats, tiny_tokenizer(), seq_length=10_000).read())
    write_samples(whole, folder / "ids", mask_prefix=folder / "masks", vocab_size=VOCAB_SIZE)
    rows = chats.read_text().splitlines()
    (folder / "bad.jsonl").write_text("\n".join([rows[0], "{}", *rows[1:], "[]"]))
    pair = f"{{type: megatron, path: {folder / 'ids'}, loss_mask: {folder / 'masks'}}}"
    forms = {"chats": str(chats), "bad": str(folder / "bad.jsonl"), "pair": pair, "blend": f"[{chats}, {DUMMY}]"}
    return [sample.loss_mask.tolist() for sample in whole], forms


def pieces(masks, over_long):
    """Return the masks of the samples that conversations become."""
    if over_long == "drop":
        return [mask for mask in masks if len(mask) <= LENGTH]
    if over_long == "truncate":
        return [mask[:LENGTH] for mask in masks]
    return [mask[at : at + LENGTH] for mask in masks for at in range(0, len(mask), LENGTH)]


def estimated(job, capsys):
    """Return the samples, tokens and supervised tokens that an estimate tells of."""
    capsys.readouterr()
    assert main([*job, "--estimate"]) == 0
    printed = capsys.readouterr().out
    numbers = re.search(r"^samples +([\d,]+) .*\ntokens +([\d,]+) \(([\d,]+) supervised", printed)
    assert numbers is not None
    return tuple(int(number.replace(",", "")) for number in numbers.groups())


def counted(masks):
    return len(masks), sum(map(len, masks)), sum(map(sum, masks))


def job(llama, corpus, form, output, *flags):
    return arguments(llama, corpus[1][form], output, "--seq-length", LENGTH, "--shuffle-seed", "none", *flags)


@pytest.mark.parametrize("over_long", ["truncate", "split", "drop"])
@pytest.mark.usefixtures("no_target")
def test_an_estimate_counts_what_samples_become_in_every_source(llama, corpus, tmp_path, capsys, over_long):
    masks = corpus[0]
    flags = ("--over-long", over_long)
    expected = pieces(masks, over_long)
    assert len(expected) != len(masks) or over_long == "truncate"
    for form in ("chats", "pair"):
        assert estimated(job(llama, corpus, form, tmp_path / "store", *flags), capsys) == counted(expected)
    blend = [*expected, *[[1] * 9] * 5]
    assert estimated(job(llama, corpus, "blend", tmp_path / "store", *flags), capsys) == counted(blend)
    skipping = (*flags, "--on-bad-row", "skip", "--max-refused", 0.2)
    assert estimated(job(llama, corpus, "bad", tmp_path / "store", *skipping), capsys) == counted(expected)
    first = pieces(masks[:3], over_long)
    for form in ("chats", "pair"):
        limited = job(llama, corpus, form, tmp_path / "store", *flags, "--max-samples", 3)
        assert estimated(limited, capsys) == counted(first)
    assert not list(tmp_path.iterdir())


def test_a_store_has_what_was_estimated_and_a_smoke_test_the_first_rows_of_it(llama, corpus, tmp_path, capsys):
    masks, forms = corpus
    blend = f"[{forms['bad']}, {forms['pair']}, {DUMMY}]"
    flags = ("--seq-length", LENGTH, "--shuffle-seed", "none", "--over-long", "split")
    skipping = (*flags, "--on-bad-row", "skip", "--max-refused", 0.2)
    expected = estimated(arguments(llama, blend, tmp_path / "store", *skipping), capsys)
    both = pieces(masks, "split") * 2
    assert expected == counted([*both, *[[1] * 9] * 5])
    cache = open_cache(precompute(llama, blend, tmp_path / "store", *skipping, "--smoke", 2))
    first_of_two_parts = len(pieces(masks[:1], "split")) * 2
    assert f"smoke test passed: {first_of_two_parts} samples" in capsys.readouterr().out
    assert (len(cache), int(cache.lengths.sum()), int(cache.supervised.sum())) == expected
    assert cache.sources == ("bad", "ids", "dummy")
    assert [int((cache.source == part).sum()) for part in range(3)] == [len(both) // 2, len(both) // 2, 5]


def test_rows_refused_before_a_crash_count_after_it(llama, chats, tmp_path, capsys, monkeypatch):
    good = chats.read_text().splitlines()
    rows = [*good[:2], "{}", *good[2:8], "{}"]  # 4 samples a shard, so the first bad row is in the first one
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))

    def crash_at_the_second(storage, record, shard, *rest):
        if shard:
            interrupt()
        write_token_shard(storage, record, shard, *rest)

    flags = ("--shuffle-seed", "none", "--on-bad-row", "skip", "--resume", "--max-refused")
    begin = arguments(llama, tmp_path / "rows.jsonl", tmp_path / "store", *flags, 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(tokenise_module, "write_token_shard", crash_at_the_second)
        assert main(begin) == 130
    line = refused(begin, capsys)
    assert "rows.jsonl, line 10: " in line
    assert "with it 2 rows cannot be used, more than max_refused (10.00% of 10 rows)" in line
    assert main(arguments(llama, tmp_path / "rows.jsonl", tmp_path / "store", *flags, 0.2)) == 0
    assert len(open_cache(tmp_path / "store")) == 8
