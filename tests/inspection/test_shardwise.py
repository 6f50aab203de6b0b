"""Shards in threads and on a cluster: each once, errors as they are, results merged in a fixed order."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.inspection.shardwise import MergeTree, Workers


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
    assert sorted(Workers(threads=threads).each(square, range(100))) == [(shard, shard**2) for shard in range(100)]


def test_no_shards_give_no_results():
    assert list(Workers().each(square, [])) == []


def test_what_a_task_raises_is_raised_and_the_rest_is_dropped():
    with pytest.raises(ValueError, match="shard 5 is refused"):
        list(Workers(threads=2).each(Refusing(5), range(10_000)))


def test_only_a_few_shards_are_begun_ahead_of_who_takes_the_results():
    begun: list[int] = []
    lock = threading.Lock()

    def task(shard: int) -> int:
        with lock:
            begun.append(shard)
        return shard

    results = Workers(threads=2).each(task, range(1000))
    next(results)
    time.sleep(0.1)
    assert len(begun) < 20
    results.close()


def test_a_cluster_does_every_shard_once(cluster):
    results = Workers(scheduler=cluster.scheduler_address).each(square, range(100))
    assert sorted(results) == [(shard, shard**2) for shard in range(100)]


def test_what_a_task_raises_on_a_cluster_is_raised_here(cluster):
    with pytest.raises(ValueError, match="shard 5 is refused"):
        list(Workers(scheduler=cluster.scheduler_address).each(Refusing(5), range(50)))


def test_a_lost_worker_changes_nothing(cluster, tmp_path):
    results = Workers(scheduler=cluster.scheduler_address).each(Killing(tmp_path / "mark"), range(50))
    assert sorted(results) == [(shard, shard**2) for shard in range(50)]
    assert (tmp_path / "mark").exists()


def test_a_shard_that_kills_every_worker_is_told_in_one_line(cluster):
    with pytest.raises(OSError, match="died of the same shard several times"):
        list(Workers(scheduler=cluster.scheduler_address).each(die, range(1)))


def test_a_scheduler_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr("dspark_store.inspection.shardwise._CONNECT_SECONDS", 1)
    with pytest.raises(OSError, match=r"no dask scheduler answers at tcp://127\.0\.0\.1:9"):
        list(Workers(scheduler="tcp://127.0.0.1:9").each(square, range(3)))


@dataclass(frozen=True)
class Span:
    """The leaves from start to stop, and how they were joined."""

    start: int
    stop: int
    text: str

    def merge(self, later: Span) -> Span:
        assert self.stop == later.start
        return Span(self.start, later.stop, f"({self.text} {later.text})")


def leaf(number: int) -> Span:
    return Span(number, number + 1, str(number))


def merged(order: list[int]) -> Span | None:
    tree = MergeTree[Span](len(order))
    for number in order:
        tree.add(number, leaf(number))
    return tree.result()


@given(st.integers(1, 40).flatmap(lambda count: st.permutations(range(count))))
def test_any_order_joins_neighbours_the_same_way(order):
    result = merged(order)
    assert result is not None
    assert (result.start, result.stop) == (0, len(order))
    assert result == merged(sorted(order))


def test_the_tree_is_that_of_neighbours():
    joined = merged([4, 2, 0, 3, 1])
    assert joined is not None
    assert joined.text == "(((0 1) (2 3)) 4)"


@given(st.integers(2, 2000))
def test_while_the_first_is_late_no_more_wait_than_the_tree_has_levels(count):
    tree = MergeTree[Span](count)
    for number in range(1, count):
        tree.add(number, leaf(number))
        assert tree.held <= 2 * (count - 1).bit_length()
    tree.add(0, leaf(0))
    assert tree.held == 1


def test_no_parts_have_no_result():
    assert MergeTree[Span](0).result() is None


def test_a_missing_part_and_one_too_many_are_refused():
    tree = MergeTree[Span](3)
    tree.add(0, leaf(0))
    tree.add(1, leaf(1))
    with pytest.raises(ValueError, match="not all of the 3 parts"):
        tree.result()
    with pytest.raises(IndexError, match="part 3 is outside the 3 parts"):
        tree.add(3, leaf(3))
