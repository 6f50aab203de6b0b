"""What a failed run takes back, and what it leaves."""

import shutil

import pytest

from dspark_store.format.storage import LocalStorage
from dspark_store.precompute import tokenise as tokenise_module
from dspark_store.precompute.__main__ import main
from dspark_store.precompute.undo import is_unfinished_beginning, new_folders_undone
from dspark_store.writers.tokens import token_ledger, write_token_shard
from tests.precompute.jobs import arguments, contents, interrupt, interrupted, precompute, write_rows

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


def test_a_row_that_cannot_be_used_takes_the_new_store_back(job_with_a_bad_last_row, tmp_path, capsys):
    assert main(job_with_a_bad_last_row) == 2
    assert "data.jsonl, line 7: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


def test_a_mended_file_then_needs_no_other_directory(job_with_a_bad_last_row, tmp_path):
    assert main(job_with_a_bad_last_row) == 2
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
