from dataclasses import replace

import pytest

from dspark_store import open_cache
from dspark_store.format.ledger import Ledger
from dspark_store.format.metadata import read_record
from dspark_store.format.storage import LocalStorage
from dspark_store.writers.lock import LOCK_KEY, StoreLock
from dspark_store.writers.recovery import sweep_finished, sweep_uncommitted
from tests.writers.small_store import small_record, write_small_store


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(write_small_store(tmp_path / "store"))


def stored_files(storage):
    """Return every file with its inode, its time and its bytes: what is left alone keeps all three."""
    files = [path for path in storage.root.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(storage.root)): (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes())
        for path in files
    }


def sweep(storage):
    return sweep_uncommitted(storage, read_record(storage))


def test_a_whole_store_is_left_alone(storage):
    before = stored_files(storage)
    assert sweep(storage) == 0
    assert stored_files(storage) == before


def test_an_empty_place_is_swept_of_nothing(tmp_path):
    assert sweep_uncommitted(LocalStorage(tmp_path / "none"), small_record()) == 0


def test_temporary_files_are_removed_wherever_they_are(storage):
    before = stored_files(storage)
    for place in ("", "input_ids", "target_hidden_states", "ledger/states", "index/length"):
        (storage.root / place / ".c.0.0.0123456789abcdef.tmp").write_bytes(b"half")
    assert sweep(storage) == 5
    assert stored_files(storage) == before


def test_states_without_a_ledger_row_are_removed_and_their_tokens_kept(storage):
    before = stored_files(storage)
    storage.delete("ledger/states/c.1.0.0")
    assert sweep(storage) == 4
    gone = {"ledger/states/c.1.0.0", "target_last_hidden_states/c.1.0.0"}
    gone |= {f"target_hidden_states/c.1.0.{slot}" for slot in range(3)}
    assert stored_files(storage) == {key: value for key, value in before.items() if key not in gone}


def test_tokens_without_a_ledger_row_are_removed_until_they_are_settled(storage):
    before = stored_files(storage)
    storage.delete("ledger/tokens/c.2.0.0")
    assert sweep(storage) == 0
    assert sweep_uncommitted(storage, replace(read_record(storage), phase="tokens")) == 2
    gone = {"ledger/tokens/c.2.0.0", "input_ids/c.2.0", "loss_mask/c.2.0"}
    assert stored_files(storage) == {key: value for key, value in before.items() if key not in gone}


def test_what_another_job_has_committed_meanwhile_is_left_alone(storage, monkeypatch):
    before = stored_files(storage)
    monkeypatch.setattr(Ledger, "committed", lambda ledger: [])
    assert sweep(storage) == 0
    assert stored_files(storage) == before


def test_a_shared_object_stays_where_its_shard_is_committed(storage):
    storage.delete("ledger/states/c.0.0.0")
    sweep(storage)
    shared = storage.path("target_hidden_states/c.1.0.2")
    assert shared.samefile(storage.path("target_last_hidden_states/c.1.0.0"))


def test_the_lock_is_no_leftover(storage):
    with StoreLock(storage):
        assert sweep(storage) == 0
        assert storage.exists(LOCK_KEY)


def test_a_finished_store_loses_the_lock_of_an_ended_job(storage):
    before = stored_files(storage)
    storage.put(LOCK_KEY, b"")
    (storage.root / ".clock.0123456789abcdef.tmp").touch()
    assert sweep_finished(storage, read_record(storage)) == 1
    assert stored_files(storage) == before


def test_a_finished_store_keeps_the_lock_of_a_job_that_is_ending(storage):
    with StoreLock(storage):
        assert sweep_finished(storage, read_record(storage)) == 0
        assert storage.exists(LOCK_KEY)


def test_a_finished_store_without_a_lock_is_left_alone(storage):
    before = stored_files(storage)
    assert sweep_finished(storage, read_record(storage)) == 0
    assert stored_files(storage) == before
    assert len(open_cache(storage.root)) == 10
