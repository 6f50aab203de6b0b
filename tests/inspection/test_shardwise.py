"""A function over every shard: here and on a cluster, with the same results."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from distributed import LocalCluster

from dspark_store.inspection.shardwise import map_shards


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:
        yield cluster


class Refusing:
    """A task that fails at one shard."""

    def __init__(self, shard: int) -> None:
        self.shard = shard

    def __call__(self, shard: int) -> int:
        if shard == self.shard:
            raise ValueError(f"shard {shard} is refused")
        return shard


class Killing:
    """A task that kills its process the first time that it comes to shard 7."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __call__(self, shard: int) -> int:
        time.sleep(0.01)
        if shard == 7 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return square(shard)


def die(shard: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return shard


def square(shard: int) -> int:
    return shard * shard


@pytest.mark.parametrize("threads", [1, 3, None])
def test_threads_do_every_shard_once(threads):
    assert sorted(map_shards(square, range(100), threads=threads)) == [(shard, shard**2) for shard in range(100)]


def test_no_shards_give_no_results():
    assert list(map_shards(square, [])) == []


def test_what_a_task_raises_is_raised_and_the_rest_is_dropped():
    with pytest.raises(ValueError, match="shard 5 is refused"):
        list(map_shards(Refusing(5), range(10_000), threads=2))


def test_only_a_few_shards_are_begun_ahead_of_who_takes_the_results():
    begun: list[int] = []
    lock = threading.Lock()

    def task(shard: int) -> int:
        with lock:
            begun.append(shard)
        return shard

    results = map_shards(task, range(1000), threads=2)
    next(results)
    time.sleep(0.1)
    assert len(begun) < 20
    results.close()


def test_a_cluster_does_every_shard_once(cluster):
    results = map_shards(square, range(100), scheduler=cluster.scheduler_address)
    assert sorted(results) == [(shard, shard**2) for shard in range(100)]


def test_what_a_task_raises_on_a_cluster_is_raised_here(cluster):
    with pytest.raises(ValueError, match="shard 5 is refused"):
        list(map_shards(Refusing(5), range(50), scheduler=cluster.scheduler_address))


def test_a_lost_worker_changes_nothing(cluster, tmp_path):
    results = map_shards(Killing(tmp_path / "mark"), range(50), scheduler=cluster.scheduler_address)
    assert sorted(results) == [(shard, shard**2) for shard in range(50)]
    assert (tmp_path / "mark").exists()


def test_a_shard_that_kills_every_worker_is_told_in_one_line(cluster):
    with pytest.raises(OSError, match="died of the same shard several times"):
        list(map_shards(die, range(1), scheduler=cluster.scheduler_address))


def test_a_scheduler_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr("dspark_store.inspection.shardwise._CONNECT_SECONDS", 1)
    with pytest.raises(OSError, match=r"no dask scheduler answers at tcp://127\.0\.0\.1:9"):
        list(map_shards(square, range(3), scheduler="tcp://127.0.0.1:9"))
