"""One function over every shard of a store, in threads or on a dask cluster; its results merged in a fixed order."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, Self

from dspark_store.progress import start_progress

if TYPE_CHECKING:
    from distributed import Client

_CONNECT_SECONDS = 20
_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class Workers:
    """Who does something to every shard: ``threads`` of this process, by default one a processor core, or a cluster.

    With a ``scheduler``, the address of a dask.distributed one (``tcp://host:8786``), its workers do it, which must see
    the store under the same path: tasks and results are then pickled, and a shard whose worker is lost is done again by
    another. So a task must give the same when it runs twice.
    """

    threads: int | None = None
    scheduler: str | None = None

    def each[Result](self, task: Callable[[int], Result], shards: Sequence[int]) -> Generator[tuple[int, Result]]:
        """Yield every shard with what ``task`` returned for it, as the results come, in any order.

        What a task raises is raised here, and what has not begun is dropped. OSError when there is no such scheduler,
        ImportError when the package is missing.
        """
        return (
            _in_threads(task, shards, self._threads)
            if self.scheduler is None
            else _on_cluster(task, shards, self.scheduler)
        )

    def in_order[Result](self, what: str, task: Callable[[int], Result], shards: Sequence[int]) -> list[Result]:
        """Return the results in the order of the shards, with a bar that says ``what`` is done."""
        results: dict[int, Result] = {}
        with start_progress(what, len(shards), "shards") as progress:
            for shard, result in self.each(task, shards):
                results[shard] = result
                progress.advance(1)
        return [results[shard] for shard in shards]

    def encoders(self, shards: int) -> int:
        """Return the threads that encode each of so many shards, where these are fewer than the threads there are."""
        return max(1, self._threads // max(1, shards)) if self.scheduler is None else 1

    @property
    def _threads(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))


def _in_threads[Result](
    task: Callable[[int], Result], shards: Sequence[int], threads: int
) -> Generator[tuple[int, Result]]:
    pool = ThreadPoolExecutor(threads, thread_name_prefix="shard")
    try:
        todo = iter(shards)
        running: dict[Future[Result], int] = {}
        while True:
            for shard in islice(todo, _IN_FLIGHT * threads - len(running)):
                running[pool.submit(task, shard)] = shard
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _on_cluster[Result](
    task: Callable[[int], Result], shards: Sequence[int], scheduler: str
) -> Generator[tuple[int, Result]]:
    todo = iter(shards)
    with _connect(scheduler) as client:
        from distributed import KilledWorker, as_completed

        def submitted(most: int) -> list[Any]:
            # pure=False: what a store was a moment ago is not what it is now
            futures = {client.submit(task, shard, pure=False): shard for shard in islice(todo, most)}
            shard_of.update({future.key: shard for future, shard in futures.items()})
            return list(futures)

        shard_of: dict[str, int] = {}
        threads = sum(client.nthreads().values())
        running = as_completed(submitted(_IN_FLIGHT * max(1, threads)), with_results=True, loop=client.loop)  # type: ignore[no-untyped-call]
        try:
            for future, result in running:
                yield shard_of.pop(future.key), result
                running.update(submitted(1))  # type: ignore[no-untyped-call]
        except KilledWorker as error:
            raise OSError(
                f"the workers at {scheduler} died of the same shard several times; their logs may say why, mostly it "
                "is want of memory"
            ) from error


def _connect(scheduler: str) -> Client:
    try:
        from distributed import Client
    except ImportError as error:
        raise ImportError("a --scheduler needs dask.distributed: pip install 'dspark-store[distributed]'") from error
    try:
        return Client(scheduler, timeout=_CONNECT_SECONDS, set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise OSError(f"no dask scheduler answers at {scheduler}: {str(error) or type(error).__name__}") from error


class Mergeable(Protocol):
    """A partial result that joins with the one of the samples behind it."""

    def merge(self, later: Self) -> Self:
        """Return the result of both."""
        ...


class MergeTree[Part: Mergeable]:
    """Merges ``leaves`` parts, numbered from 0, along a fixed binary tree.

    Adding floating-point numbers in another order gives other bits. Here neighbours 2k and 2k + 1 are merged, then
    neighbours among those, and so on, whenever both are there: which parts meet does not depend on the order in which
    they come. When they come nearly in order, as many are held as the tree has levels, even while one is late.
    """

    def __init__(self, leaves: int) -> None:
        self._leaves = leaves
        self._waiting: dict[tuple[int, int], Part] = {}

    @property
    def held(self) -> int:
        """Parts that wait for their neighbour."""
        return len(self._waiting)

    def add(self, leaf: int, part: Part) -> None:
        """Take the part of a leaf; each once. IndexError for one outside the tree."""
        if not 0 <= leaf < self._leaves:
            raise IndexError(f"part {leaf} is outside the {self._leaves} parts")
        level, place, width = 0, leaf, self._leaves
        while width > 1:
            neighbour = place ^ 1
            if neighbour < width:
                other = self._waiting.pop((level, neighbour), None)
                if other is None:
                    break
                part = part.merge(other) if place < neighbour else other.merge(part)
            level, place, width = level + 1, place // 2, (width + 1) // 2
        self._waiting[level, place] = part

    def result(self) -> Part | None:
        """Return all parts merged, None where there are none; ValueError while one is missing."""
        if self._leaves == 0:
            return None
        root = (self._leaves - 1).bit_length(), 0
        if self._waiting.keys() != {root}:
            raise ValueError(f"not all of the {self._leaves} parts have come")
        return self._waiting[root]
