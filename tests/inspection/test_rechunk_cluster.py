"""A copy on a dask cluster is the one that threads make, whatever becomes of the workers."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from dspark_store.format.ledger import state_ledger
from dspark_store.format.metadata import read_seal, write_metadata
from dspark_store.format.shard import ObjectRecord
from dspark_store.format.storage import LocalStorage
from dspark_store.inspection.copy_plan import copy_record
from dspark_store.inspection.copy_shards import CopyTask, copy_states, copy_tokens
from dspark_store.inspection.rechunk import rechunk
from dspark_store.inspection.shardwise import Workers
from dspark_store.readers.cache import open_cache
from dspark_store.writers.lock import LOCK_KEY, LostLockError, StoreLock
from dspark_store.writers.publish import complete_store, settle_tokens
from tests.inspection.copies import MANIFEST, OTHER, assert_copied, contents
from tests.stores import build_store

SAMPLES = 120


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    lengths = [1 + 7 * sample % 20 for sample in range(SAMPLES)]
    return build_store(
        tmp_path_factory.mktemp("copied") / "source", lengths=lengths, fields={"manifest": MANIFEST}
    ).path


@pytest.fixture(scope="module")
def whole(source):
    """The files of a copy that one thread made."""
    place = source.parent / "whole"
    rechunk(source, place, OTHER, workers=Workers(threads=1))
    assert_copied(source, place)
    return contents(place)


def test_a_cluster_writes_the_bytes_that_threads_write(source, whole, cluster, tmp_path):
    rechunk(source, tmp_path / "copy", OTHER, workers=Workers(scheduler=cluster.scheduler_address))
    assert contents(tmp_path / "copy") == whole


def test_a_lost_worker_changes_nothing(source, whole, cluster, tmp_path):
    place, lost = tmp_path / "copy", list[int]()

    def kill_one() -> None:
        while len(list((place / "ledger" / "states").glob("c.*"))) < 5:
            time.sleep(0.005)
        lost.append(next(iter(cluster.workers.values())).pid)
        os.kill(lost[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    rechunk(source, place, OTHER, workers=Workers(scheduler=cluster.scheduler_address))
    killer.join()
    assert len(lost) == 1
    assert contents(place) == whole


def test_what_is_damaged_is_named_from_a_worker_too(source, cluster, tmp_path):
    damaged = build_store(tmp_path / "damaged").path
    (damaged / "target_hidden_states" / "c.1.0.0").unlink()
    with pytest.raises(ValueError, match=r"the source is damaged.*target_hidden_states/c\.1\.0\.0"):
        rechunk(damaged, tmp_path / "copy", OTHER, workers=Workers(scheduler=cluster.scheduler_address))


@pytest.fixture
def begun(source, tmp_path):
    """A copy whose tokens are settled, and what its states are copied by; the lock is held."""
    old, new = LocalStorage(source), LocalStorage(tmp_path / "copy")
    seal = read_seal(old)
    wanted = copy_record(open_cache(source).record, seal, OTHER)
    with StoreLock(new) as lock:
        write_metadata(new, wanted)
        task = CopyTask(old, seal, new, wanted, lock.holder)
        for shard in range(wanted.schema.tokens.num_shards):
            copy_tokens(task, shard)
        record = settle_tokens(new, wanted)
        write_metadata(new, record)
        yield CopyTask(old, seal, new, record, lock.holder)


def test_shards_that_are_written_twice_at_a_time_are_committed_once(begun):
    """As when a worker is taken for lost, and lives."""
    shards = range(begun.record.schema.tokens.num_shards)
    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(partial(copy_states, begun), [shard for shard in shards for _ in range(4)]))
    assert sum(stored > 0 for stored in written) == len(shards)
    complete_store(begun.destination, begun.record)
    assert not list(begun.destination.temporaries())


def test_a_worker_that_comes_late_writes_no_more(begun, monkeypatch):
    """It has begun before its shard was committed by another, and the job has ended since."""
    late = pickle.loads(pickle.dumps(begun))
    monkeypatch.setattr(LocalStorage, "exists", lambda self, key: False)
    for shard in (0, 1):
        copy_states(begun, shard)
    before = contents(begun.destination.root)
    assert copy_states(late, 0) == 0  # the same bytes
    assert contents(begun.destination.root) == before
    (begun.destination.root / LOCK_KEY).unlink()
    with pytest.raises(LostLockError):
        copy_states(late, 1)
    assert {**contents(begun.destination.root), LOCK_KEY: before[LOCK_KEY]} == before


def test_other_bytes_of_a_committed_shard_take_its_commit_back(begun, monkeypatch):
    """As when workers have other versions of a codec; the shard is then done again."""
    copy_states(begun, 0)
    ledger = state_ledger(begun.destination, begun.record.schema)
    row = ledger.row(0)
    ledger.retract(0)
    ledger.publish(0, [ObjectRecord(int(nbytes), int(digest) ^ 1) for nbytes, digest in row])
    monkeypatch.setattr(LocalStorage, "exists", lambda self, key: False)
    with pytest.raises(ValueError, match="was written twice, with other bytes"):
        copy_states(begun, 0)
    assert ledger.committed() == []
