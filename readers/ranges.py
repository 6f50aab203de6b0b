"""The first stage of reading: ranges of stored bytes, many in flight, of several batches.

A request names an object; when that is open, it says which ranges of it go where; when they have come, it is told so.
`LocalRanges` reads files in threads. A bucket's stage keeps requests in flight without a thread for each.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Buffer, Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.objects import StoredObject
from dspark_store.readers.threads import USABLE_CORES, ForkSafeLock, Workers

DEFAULT_IN_FLIGHT = min(16, max(4, 2 * USABLE_CORES))
"""For local files: threads beyond this only take the cores, and the batch in their caches, from one another."""
DEFAULT_OPEN_OBJECTS = 256
TAIL_BYTES = 256 * 1024 * 1024
"""For the indices of open objects, about 12 bytes per chunk: there may be a million chunks in a shard."""
IN_FLIGHT_BYTES = 64 * 1024 * 1024
_QUEUED = 2
"""Requests that are taken, per one in flight: the next ones are at hand, and no more batches begun than that takes."""
_EIGHTHS = 3


type ObjectName = tuple[str, int, int]
"""An object of the store: its column, shard, and slot of the layer, 0 where a column has none."""


class Range(NamedTuple):
    """A range of an object, from ``offset`` on, and the ``buffers`` that it fills, one after the other."""

    offset: int
    buffers: Sequence[Buffer]


class RangeRequest(Protocol):
    """What a stage is asked for. Its methods are called once each, in this order, from any thread."""

    @property
    def name(self) -> ObjectName:
        """The object."""
        ...

    @property
    def nbytes(self) -> int:
        """Stored bytes that it takes, at most."""
        ...

    def ranges(self, stored: StoredObject) -> Sequence[Range]:
        """Return the ranges of the open object; DamagedStoreError when they are not there."""
        ...

    def arrived(self, error: BaseException | None) -> None:
        """Take what filled the buffers, or the ``error`` that came between; it does not raise.

        Decodes: a stage calls it in few threads at a time. When it returns, the stored bytes are no longer kept.
        """
        ...


class RangeStage(Protocol):
    """Reads what is submitted, in about this order, side by side, within a bound in number and one in bytes."""

    def submit(self, request: RangeRequest) -> None:
        """Take a request; waits while those taken and not decoded are at a bound, in number or in bytes."""
        ...

    def fetch_now(self, request: RangeRequest) -> None:
        """Fill a request's buffers before this returns, whatever else was taken; DamagedStoreError or OSError."""
        ...

    def close(self) -> None:
        """Let go of threads and open objects; the next request takes new ones."""
        ...


class ObjectPool:
    """Open objects by name, at most ``limit`` of them, with tails of at most ``tail_bytes``; one is always kept.

    The least recently used one is let go. It stays open as long as somebody reads it.
    """

    def __init__(self, limit: int = DEFAULT_OPEN_OBJECTS, tail_bytes: int = TAIL_BYTES) -> None:
        self._limit, self._tail_bytes = limit, tail_bytes
        self._objects: OrderedDict[ObjectName, StoredObject] = OrderedDict()
        self._nbytes = 0
        self._lock = ForkSafeLock()

    def get(self, name: ObjectName, opening: Callable[[ObjectName], StoredObject]) -> StoredObject:
        """Return an object, which ``opening`` opens and checks when it is first asked for."""
        with self._lock.held:
            if name in self._objects:
                self._objects.move_to_end(name)
                return self._objects[name]
        opened = opening(name)
        with self._lock.held:
            if name in self._objects:  # another thread was quicker
                return self._objects[name]
            self._objects[name] = opened
            self._nbytes += opened.tail.nbytes
            while len(self._objects) > self._limit or (self._nbytes > self._tail_bytes and len(self._objects) > 1):
                self._nbytes -= self._objects.popitem(last=False)[1].tail.nbytes
        return opened

    def close(self) -> None:
        """Let every object go."""
        with self._lock.held:
            self._objects.clear()
            self._nbytes = 0


class LocalRanges:
    """`RangeStage` of local files: ``in_flight`` threads, each with one request at a time.

    The thread that read also decodes, ``threads`` of them at once: what just came is still in its core's cache, and to
    hand it over takes longer than to decode what is small.
    """

    def __init__(
        self, opening: Callable[[ObjectName], StoredObject], *, threads: int, in_flight: int, open_objects: int
    ) -> None:
        if in_flight < 1:
            raise ValueError(f"in_flight must be >= 1, got {in_flight}")
        if open_objects < 1:
            raise ValueError(f"open_objects must be >= 1, got {open_objects}")
        self._opening = opening
        self._most, self._threads = _QUEUED * in_flight, threads
        # a thread may hold one more object, which it just opened, or which was let go while it reads
        self._objects = ObjectPool(max(1, open_objects - in_flight))
        self._workers = Workers(in_flight, "read")
        self._renew()

    def _renew(self) -> None:
        self._process, self._count, self._nbytes, self._room = os.getpid(), 0, 0, threading.Condition()
        self._decoding = threading.Semaphore(self._threads)

    def submit(self, request: RangeRequest) -> None:
        """See `RangeStage`."""
        if self._process != os.getpid():
            self._renew()  # a fork has none of its parent's threads, and so nothing in flight
        with self._room:
            self._room.wait_for(lambda: self._has_room(request.nbytes))
            self._count, self._nbytes = self._count + 1, self._nbytes + request.nbytes
        self._workers.put(lambda: self._serve(request))

    def _has_room(self, nbytes: int) -> bool:
        return not self._count or (self._count < self._most and self._nbytes + nbytes <= IN_FLIGHT_BYTES)

    def _serve(self, request: RangeRequest) -> None:
        error: BaseException | None = None
        try:
            self.fetch_now(request)
        except BaseException as failed:  # noqa: BLE001 - the request hands it to whoever waits
            error = failed
        with self._decoding:
            request.arrived(error)
        with self._room:
            self._count, self._nbytes = self._count - 1, self._nbytes - request.nbytes
            if self._count <= self._most // 2 and self._nbytes <= IN_FLIGHT_BYTES // 2:  # room for several at once
                self._room.notify_all()

    def fetch_now(self, request: RangeRequest) -> None:
        """See `RangeStage`; in this thread."""
        stored = self._objects.get(request.name, self._opening)
        for offset, buffers in request.ranges(stored):
            wanted = sum(memoryview(buffer).nbytes for buffer in buffers)
            read = stored.reader.read_vector if len(buffers) > 1 else None
            count = read(buffers, offset) if read is not None else stored.reader.read_into(buffers[0], offset)
            if count != wanted:
                raise DamagedStoreError(f"object {stored.key} ends {wanted - count} bytes early")

    def close(self) -> None:
        """See `RangeStage`."""
        self._workers.close()
        self._objects.close()


class Buffers:
    """Memory for stored bytes, used again; free buffers take at most ``IN_FLIGHT_BYTES``."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}
        self._nbytes = 0
        self._lock = ForkSafeLock()

    def take(self, nbytes: int) -> np.ndarray:
        """Return at least ``nbytes`` bytes, uint8, at most an eighth more."""
        step = 1 << max(9, nbytes.bit_length() - _EIGHTHS)
        size = -(-nbytes // step) * step
        with self._lock.held:
            free = self._free.get(size)
            if free:
                self._nbytes -= size
                return free.pop()
        return np.empty(size, np.uint8)

    def give(self, buffer: np.ndarray) -> None:
        """Take a buffer back."""
        with self._lock.held:
            if self._nbytes + buffer.size <= IN_FLIGHT_BYTES:
                self._free.setdefault(buffer.size, []).append(buffer)
                self._nbytes += buffer.size

    def close(self) -> None:
        """Let the free buffers go."""
        with self._lock.held:
            self._free.clear()
            self._nbytes = 0
