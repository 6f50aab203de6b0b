"""``dspark-store tokens --compare``: which samples of a store would be others today."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dspark_store.cli.main import main
from dspark_store.cli.terminal import MARKS
from dspark_store.precompute import tokenise as tokenise_module
from dspark_store.sources.chat import ChatSource
from tests.precompute.jobs import arguments, interrupted, precompute, rule_1, write_rows
from tests.stores import build_store
from tests.tiny import save_target_dir, write_chats

FLAGS = ("--shuffle-seed", 7, "--split", "train[1:]", "--over-long", "split", "--mask-headers")
NO_MARKS = str.maketrans("", "", "".join(MARKS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    save_target_dir(folder / "target")
    write_chats(folder / "chats.jsonl", 11)
    return folder


@pytest.fixture(scope="module")
def old(folder):
    """A store by rule 1, where the ids of one sample were others, and the mask of another."""
    with rule_1():
        return precompute(folder / "target", folder / "chats.jsonl", folder / "old")


@pytest.fixture(scope="module")
def blend(folder):
    return f"[{{source: {folder / 'chats.jsonl'}}}, {{source: {{type: dummy, samples: 3, max_length: 9}}}}]"


def compared(capsys, *words, code=0):
    capsys.readouterr()
    assert main(["tokens", *map(str, words)]) == code
    printed = capsys.readouterr()
    return printed.out if code == 0 else printed.err


def test_what_differs_is_counted_and_shown_with_what_is_supervised(folder, old, capsys):
    text = compared(capsys, "--compare", old)
    assert "rule of the store's conversations: 1, of this version: 2\n" in text
    assert "2 of 11 samples (18.2%) would be others today\n" in text
    assert "  1: other ids\n" in text
    assert "  1: the same ids, another mask\n" in text
    assert f"\nsample 1 ({folder / 'chats.jsonl'}, line " in text
    ids, mask = text.split("\nsample ")[1:]
    assert "): other ids, from token" in ids
    assert ids.count("       ids [") == 2
    assert "): the same ids, another mask, from token" in mask
    stored, today = mask.splitlines()[1:3]
    assert (stored.startswith("store  "), today.startswith("today  ")) == (True, True)
    assert stored != today
    assert stored.translate(NO_MARKS)[7:] == today.translate(NO_MARKS)[7:]


def test_a_store_by_todays_rule_is_what_its_source_gives(folder, tmp_path, capsys):
    store = precompute(folder / "target", folder / "chats.jsonl", tmp_path / "store", *FLAGS, "--seq-length", 40)
    words = (folder / "chats.jsonl", "--target-model", folder / "target")
    for given in ((), words, ("--num-workers", 1)):
        assert " samples (0.0%) would be others today\n" in compared(capsys, *given, "--compare", store)


def test_only_three_are_shown(old, capsys, monkeypatch):
    read = ChatSource.read

    def other(sample):
        return replace(sample, loss_mask=1 - sample.loss_mask)

    monkeypatch.setattr(ChatSource, "read", lambda self, cursor=0: map(other, read(self, cursor)))
    text = compared(capsys, "--compare", old)
    assert "11 of 11 samples (100.0%) would be others today\n" in text
    assert [line.split()[1] for line in text.splitlines() if line.startswith("sample ")] == ["0", "1", "2"]


def test_the_parts_of_a_blend_are_compared(folder, blend, tmp_path, capsys):
    with rule_1():
        store = precompute(folder / "target", blend, tmp_path / "store")
    assert "2 of 14 samples (14.3%) would be others today\n" in compared(capsys, "--compare", store)


def test_a_copy_in_other_shards_is_compared(old, tmp_path, capsys):
    assert main(["rechunk", str(old), str(tmp_path / "copy"), "--shard-size", "6"]) == 0
    assert "2 of 11 samples (18.2%)" in compared(capsys, "--compare", tmp_path / "copy")


def test_a_store_in_its_token_phase_is_compared_as_far_as_it_is(folder, tmp_path, capsys):
    job = arguments(folder / "target", folder / "chats.jsonl", tmp_path / "store")
    with rule_1():
        interrupted(job, tokenise_module, "settle_tokens")
    (tmp_path / "store" / "ledger" / "tokens" / "c.1.0.0").unlink()
    assert "1 of 4 samples (25.0%)" in compared(capsys, "--compare", tmp_path / "store")


def test_a_row_that_is_left_out_today_shifts_no_other(folder, tmp_path, capsys, monkeypatch):
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * n}]} for n in range(9)
    ]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    store = precompute(folder / "target", data, tmp_path / "store", "--min-supervised", 2, "--shuffle-seed", "none")
    read = ChatSource.read
    monkeypatch.setattr(
        ChatSource, "read", lambda self, cursor=0: (s for s in read(self, cursor) if self.record_of(s.cursor) != 3)
    )
    text = compared(capsys, "--compare", store)
    assert "1 of 8 samples (12.5%) would be others today\n  1: not there today\n" in text
    assert "today  none" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--over-long", "drop"), "over_long: store 'truncate', here 'drop'"),
        (("--chat-template", "{{ messages }}"), "the chat template is not the one that"),
    ],
)
def test_what_is_not_as_the_store_was_made_is_refused(old, capsys, flags, message):
    assert message in compared(capsys, "--compare", old, *flags, code=2)


def test_other_data_is_refused(folder, old, tmp_path, capsys):
    other = write_chats(tmp_path / "other.jsonl", 12)
    assert "content_sha256: store " in compared(capsys, other, "--compare", old, code=2)


def test_without_a_store_data_and_target_must_be_given(folder, capsys):
    assert "required but not given: the data" in compared(capsys, "--target-model", "x", code=2)
    assert "required but not given: --target-model" in compared(capsys, folder / "chats.jsonl", code=2)


def test_a_store_that_no_precompute_made_cannot_be_compared(tmp_path, capsys):
    store = build_store(tmp_path / "built").path
    assert "does not say what it was made from" in compared(capsys, "--compare", store, code=2)
