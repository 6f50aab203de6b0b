"""What a failed run takes back, and what it leaves."""

import errno
import json
import shutil
from dataclasses import replace

import pytest
import torch
import transformers

from dspark_store.format.ledger import token_ledger
from dspark_store.format.metadata import write_metadata
from dspark_store.format.storage import LocalStorage
from dspark_store.format.token_shards import TokenRows
from dspark_store.precompute import tokenise as tokenise_module
from dspark_store.precompute.__main__ import main
from dspark_store.precompute.undo import (
    TargetError,
    is_unfinished_beginning,
    new_folders_undone,
    new_store_undone,
    retract_broken,
)
from dspark_store.sources.source import SourceError
from dspark_store.writers.lock import LOCK_KEY, StoreLock
from dspark_store.writers.tokens import write_token_shard
from tests.precompute.jobs import arguments, contents, interrupt, interrupted, precompute, write_rows
from tests.writers.small_store import random_tokens, small_record

GOOD_ROWS = [f"row {number}" for number in range(6)]
BAD_ROW = {"text": "no messages"}


@pytest.fixture
def job_with_a_bad_last_row(llama, tmp_path):
    data = write_rows(tmp_path / "data.jsonl", [*GOOD_ROWS, BAD_ROW])
    return arguments(llama, data, tmp_path / "store", "--shuffle-seed", "none")


def test_a_run_that_is_interrupted_before_its_first_shard_leaves_nothing(llama, chats, tmp_path):
    interrupted(arguments(llama, chats, tmp_path / "new" / "store"), tokenise_module, "write_token_shard")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_was_there_stays_with_what_is_hidden_in_it(llama, chats, tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / ".note").write_text("mine")
    interrupted(arguments(llama, chats, tmp_path / "store"), tokenise_module, "write_token_shard")
    assert [path.name for path in (tmp_path / "store").iterdir()] == [".note"]


def test_a_run_that_is_interrupted_later_leaves_its_shards(llama, chats, tmp_path):
    output = interrupted(arguments(llama, chats, tmp_path / "store"), tokenise_module, "settle_tokens")
    assert token_ledger(LocalStorage(output)).committed() == [0, 1, 2]


def test_a_row_that_cannot_be_used_takes_the_new_store_back_and_a_mended_file_needs_no_other_directory(
    job_with_a_bad_last_row, tmp_path, capsys
):
    assert main(job_with_a_bad_last_row) == 2
    assert "data.jsonl, line 7: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]
    write_rows(tmp_path / "data.jsonl", GOOD_ROWS)
    assert main(job_with_a_bad_last_row) == 0


def test_a_row_that_cannot_be_used_leaves_an_older_store_as_it_was(job_with_a_bad_last_row, monkeypatch):
    calls = []

    def write_one(*args):
        calls.append(args)
        return write_token_shard(*args) if len(calls) == 1 else interrupt()

    with monkeypatch.context() as patch:
        patch.setattr(tokenise_module, "write_token_shard", write_one)
        assert main([*job_with_a_bad_last_row, "--max-samples", "6"]) == 130
    output = job_with_a_bad_last_row[job_with_a_bad_last_row.index("--output-dir") + 1]
    before = contents(output)
    assert main([*job_with_a_bad_last_row, "--resume"]) == 2
    assert contents(output) == before


def test_metadata_alone_is_the_beginning_of_a_store_and_is_begun_again(llama, chats, tmp_path):
    whole = precompute(llama, chats, tmp_path / "whole")
    for path in whole.rglob("zarr.json"):
        if path.parent != whole:
            copy = tmp_path / "killed" / path.relative_to(whole)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    assert is_unfinished_beginning(tmp_path / "killed")
    assert contents(precompute(llama, chats, tmp_path / "killed")) == contents(whole)


@pytest.mark.parametrize("name", ["ledger/tokens/c.0.0.0", "input_ids/c.0.0", "target/notes.txt", "index/.hidden"])
def test_a_folder_with_anything_else_is_no_beginning(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True)
    assert is_unfinished_beginning(tmp_path)
    (tmp_path / name).write_text("")
    assert not is_unfinished_beginning(tmp_path)


def test_new_folders_stay_when_something_is_in_them(tmp_path):
    def fail():
        with new_folders_undone(tmp_path / "a" / "b" / "c"):
            (tmp_path / "a" / "b" / "c").mkdir(parents=True)
            (tmp_path / "a" / "file").write_text("")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "file"]


def caused(error, *causes):
    """Return an error that was raised from others, each from the next."""
    for effect, cause in zip((error, *causes), causes, strict=False):
        effect.__cause__ = cause
    return error


def begin_and_fail(root, error, others_lock=None):
    """Begin a store, commit its first shard of tokens, and fail; return the storage."""
    storage, record = LocalStorage(root), small_record()

    def run():
        with StoreLock(storage) as lock, new_store_undone(storage, lock.holder):
            write_metadata(storage, record)
            write_token_shard(storage, record, 0, random_tokens((7, 16), seed=0), cursor=2)
            if others_lock is not None:
                storage.put(LOCK_KEY, others_lock)
            raise error

    with pytest.raises(type(error)):
        run()
    return storage


FULL = OSError(errno.ENOSPC, "no space left for what is unpacked")
COMES_AGAIN = [
    SourceError("line 7 has no messages"),
    caused(SourceError("line 7 is not JSON"), json.JSONDecodeError("x", "y", 0)),
    caused(SourceError("line 7 is nested too deeply"), RecursionError()),
    caused(TargetError("lacks lm_head.weight"), ValueError("lacks lm_head.weight")),
    caused(TargetError("no such attention"), ValueError("no such attention"), ImportError("flash_attn")),
]
MAY_PASS = [
    KeyboardInterrupt(),
    OSError(errno.EIO, "Input/output error"),
    caused(SourceError("data.parquet cannot be read"), FULL),
    caused(SourceError("the dataset cannot be loaded"), RuntimeError("a process died")),
    *(
        caused(TargetError("cannot load the weights"), ValueError("cannot load the weights"), cause)
        for cause in (
            MemoryError(),
            torch.OutOfMemoryError("CUDA out of memory"),
            RuntimeError("connection closed by peer"),
            ConnectionError("no route to host"),
            Exception("what a library calls a time-out"),
        )
    ),
]


@pytest.mark.parametrize("error", COMES_AGAIN, ids=repr)
def test_a_refusal_that_would_come_again_takes_the_new_store_back(tmp_path, error):
    begin_and_fail(tmp_path / "store", error)
    assert list((tmp_path / "store").iterdir()) == []


@pytest.mark.parametrize("error", MAY_PASS, ids=repr)
def test_a_failure_that_may_pass_takes_no_committed_token_back(tmp_path, error):
    assert token_ledger(begin_and_fail(tmp_path / "store", error)).committed() == [0]


def test_a_store_that_another_job_holds_by_now_is_left_to_it(tmp_path):
    storage = begin_and_fail(tmp_path / "store", COMES_AGAIN[0], others_lock=b"another job's")
    assert token_ledger(storage).committed() == [0]
    assert storage.read(LOCK_KEY) == b"another job's"


def test_a_target_for_which_there_is_no_memory_just_now_is_gone_on_with(store, llama, chats, tmp_path, monkeypatch):
    def load(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    job = arguments(llama, chats, tmp_path / "store")
    with monkeypatch.context() as patch:
        patch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
        assert main(job) == 2
    assert token_ledger(LocalStorage(tmp_path / "store")).committed() == [0, 1, 2]
    assert main([*job, "--resume"]) == 0
    assert contents(tmp_path / "store") == contents(store)


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("input_ids/c.1.0", False),
        ("loss_mask/c.1.0", False),
        ("loss_mask/c.1.0", True),
        ("ledger/sources/c.1.0", False),
    ],
)
def test_a_committed_shard_of_tokens_without_all_of_its_objects_is_taken_back(tmp_path, name, cut):
    storage, record = LocalStorage(tmp_path / "store"), small_record()
    record = replace(record, schema=replace(record.schema, sources=("chats", "code")))
    for shard in range(3):
        rows = random_tokens((7, 16), seed=shard)
        write_token_shard(storage, record, shard, TokenRows(rows.ids, rows.masks, [0, 1]), cursor=2)
    assert retract_broken(storage, record) == []
    kept = storage.read(name)[:-1]
    storage.delete(name)
    if cut:
        storage.put(name, kept)
    (line,) = retract_broken(storage, record)
    assert line.startswith(f"shard 1 ({name} ")
    assert token_ledger(storage).committed() == [0, 2]
