"""Fetching one sample's chunks: ranges of stored objects, decoded into the caller's buffer."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from dspark_store.format.codecs import CodecChain
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.grid import ShardGrid
from dspark_store.format.objects import Expected, StoredObject, open_object
from dspark_store.format.storage import Storage

DEFAULT_OPEN_OBJECTS = 256


class ObjectPool:
    """Open objects with their checked tails, at most ``limit`` of them; the least recently used one is let go."""

    def __init__(self, storage: Storage, limit: int = DEFAULT_OPEN_OBJECTS) -> None:
        self._storage = storage
        self._limit = limit
        self._objects: OrderedDict[str, StoredObject] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str, slots: int, expected: Expected) -> StoredObject:
        """Return the object at ``key``, opened and checked when it is first asked for.

        An object that is let go stays open as long as somebody reads it.
        """
        with self._lock:
            if key in self._objects:
                self._objects.move_to_end(key)
                return self._objects[key]
        stored = open_object(self._storage, key, slots, expected)
        with self._lock:
            self._objects[key] = stored
            while len(self._objects) > self._limit:
                self._objects.popitem(last=False)
        return stored

    def close(self) -> None:
        """Let every object go."""
        with self._lock:
            self._objects.clear()


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """The stored positions [start, stop) of one row of a shard: what one read fetches."""

    row: int
    start: int
    stop: int


def fetch_run(
    stored: StoredObject, grid: ShardGrid, chain: CodecChain, run: ChunkRun, out: np.ndarray, *, verify: bool
) -> None:
    """Fetch the positions of a run into ``out``, (stop - start, ...) of the stored dtype, any strides.

    The chunks of a row stand side by side, so this is one read. With ``verify`` off, checksums are not looked at.
    DamagedStoreError names the object.
    """
    step = grid.chunk_tokens
    first, last = run.start // step, -(-run.stop // step)
    slots = range(run.row * grid.chunks_per_row + first, run.row * grid.chunks_per_row + last)
    offsets, sizes = stored.tail.offsets[slots.start : slots.stop], stored.tail.sizes[slots.start : slots.stop]
    if not sizes.all():
        raise DamagedStoreError(f"object {stored.key} lacks a chunk of row {run.row}")
    begin = int(offsets[0])
    wanted = int(offsets[-1] + sizes[-1]) - begin
    if wanted != int(sizes.sum()):
        raise DamagedStoreError(f"object {stored.key} does not keep the chunks of row {run.row} together")
    data = memoryview(stored.reader.read(begin, wanted))
    if len(data) != wanted:
        raise DamagedStoreError(f"object {stored.key} ends {wanted - len(data)} bytes early")
    scratch: np.ndarray | None = None
    for slot, offset, size in zip(slots, offsets, sizes, strict=True):
        chunk = data[int(offset) - begin : int(offset) - begin + int(size)]
        low = (slot - run.row * grid.chunks_per_row) * step
        target = out[max(low, run.start) - run.start : min(low + step, run.stop) - run.start]
        whole = len(target) == step and target.flags.c_contiguous
        if not whole and scratch is None:
            scratch = np.empty((step, *out.shape[1:]), out.dtype)
        buffer = target if whole or scratch is None else scratch
        try:
            chain.decode(chunk, buffer, crc=int(stored.tail.crcs[slot]) if verify else None)
        except DamagedStoreError as error:
            raise DamagedStoreError(f"object {stored.key}, slot {slot}: {error}") from error
        if not whole:
            skip = max(low, run.start) - low
            target[...] = buffer[skip : skip + len(target)]
