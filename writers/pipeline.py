"""Encoding in threads, writing behind: the ordered pipeline between a captured batch and the objects on disk."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np


class BufferPool:
    """Hands out byte buffers of one size, and takes them back.

    It grows to as many as are ever out at once, and gives nothing back to the allocator: allocating every chunk anew
    leaves holes that cost up to half of the memory again.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self._lock = threading.Lock()

    def acquire(self, nbytes: int) -> np.ndarray:
        """Return a buffer of ``nbytes`` bytes, (nbytes,) uint8, of any content."""
        with self._lock:
            while self._free:
                buffer = self._free.pop()
                if buffer.size == nbytes:
                    return buffer
        return np.empty(nbytes, np.uint8)

    def release(self, buffer: np.ndarray) -> None:
        """Take a buffer back; its holder must not touch it afterwards."""
        with self._lock:
            self._free.append(buffer)


@dataclass(slots=True)
class _Marker:
    """A place in the queue that somebody waits for; ``error`` is the first of all that stood before it."""

    passed: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


type _Item = tuple[Callable[..., None], int] | _Marker | None


class EncodePipeline:
    """Runs encode tasks on ``threads`` threads and hands their results to sinks in the order of submission.

    At most ``buffer_bytes`` of what is submitted are under way; `submit` waits beyond that. Because sinks run
    one at a time and in order, an object's bytes do not depend on the number of threads. The first error of a task or
    a sink is raised by the next `submit`, and by every `flush` behind it; what was queued behind it is dropped.
    Several threads may submit and flush. ``buffers`` are for the chunks themselves. ``encode_seconds`` and
    ``write_seconds`` are what tasks and sinks have taken so far, by the clock and added up over the threads.
    """

    def __init__(self, threads: int, buffer_bytes: int) -> None:
        if threads < 1 or buffer_bytes < 1:
            raise ValueError(f"threads and buffer_bytes must be >= 1, got {threads} and {buffer_bytes}")
        self.buffers = BufferPool()
        self.encode_seconds = self.write_seconds = 0.0
        self._pool = ThreadPoolExecutor(threads, "encode")
        self._queue: deque[_Item] = deque()  # its first item is the one that the writing thread has in hand
        self._changed = threading.Condition()
        self._buffer_bytes = buffer_bytes
        self._pending_bytes = 0
        self._error: BaseException | None = None
        self._writer = threading.Thread(target=self._drain, name="write", daemon=True)
        self._writer.start()

    def submit[T](self, task: Callable[[], T], nbytes: int, sink: Callable[[T], None]) -> None:
        """Queue a task that takes ``nbytes`` bytes until its result has reached ``sink``."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._error or not self._queue or self._pending_bytes + nbytes <= self._buffer_bytes
            )
            self._raise_error()
            deliver = partial(self._deliver, self._pool.submit(_timed, task), sink)  # may fail for want of a thread
            self._put((deliver, nbytes))
            self._pending_bytes += nbytes

    def flush(self) -> None:
        """Wait until every chunk that was submitted before has reached its sink."""
        error = self._settle()
        if error is not None:
            raise error

    def reset(self) -> None:
        """Wait for what is under way and forget an error, so that the shard it broke can be done again.

        Nobody may submit meanwhile.
        """
        self._settle()
        self._error = None

    def close(self) -> None:
        """End the threads; chunks still under way are finished or dropped."""
        with self._changed:
            self._put(None)
        self._writer.join()
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _put(self, item: _Item) -> None:
        """Queue an item; the caller holds the lock."""
        self._queue.append(item)
        self._changed.notify_all()

    def _settle(self) -> BaseException | None:
        """Wait until the writing thread has come past all that is queued now; return the first error up to there."""
        if not self._writer.is_alive():
            return self._error
        marker = _Marker()
        with self._changed:
            self._put(marker)
        marker.passed.wait()
        return marker.error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _drain(self) -> None:
        while (item := self._next()) is not None:
            failure: BaseException | None = None
            if isinstance(item, _Marker):
                item.error = self._error
                item.passed.set()
            else:
                try:
                    item[0](wanted=self._error is None)
                except BaseException as error:  # noqa: BLE001 - handed to the thread that submits
                    failure = error
            with self._changed:
                self._error = self._error or failure
                self._pending_bytes -= 0 if isinstance(item, _Marker) else item[1]
                self._queue.popleft()
                if not self._queue:  # an interrupt may have stopped a `submit` before it counted what it queued
                    self._pending_bytes = 0
                self._changed.notify_all()
            del item

    def _next(self) -> _Item:
        """Wait for the first item of the queue."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue)
            return self._queue[0]

    def _deliver[T](self, result: Future[tuple[T, float]], sink: Callable[[T], None], *, wanted: bool) -> None:
        value, seconds = result.result()
        self.encode_seconds += seconds
        if wanted:
            _, seconds = _timed(partial(sink, value))
            self.write_seconds += seconds


def _timed[T](call: Callable[[], T]) -> tuple[T, float]:
    started = time.perf_counter()
    value = call()
    return value, time.perf_counter() - started
