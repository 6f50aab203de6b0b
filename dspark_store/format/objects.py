"""Opening a stored object as what it ought to be, and reading its chunks."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dspark_store.format.codecs import CodecChain
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.grid import ShardGrid
from dspark_store.format.shard import ObjectRecord, ObjectTail, Place, read_tail
from dspark_store.format.storage import ObjectReader, Storage

_WINDOW_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Expected:
    """What must stand at a key: the store, the place, and, where they are known, the ledger's row and the tokens."""

    store_id: str
    place: Place
    record: ObjectRecord | None = None
    tokens: str | None = None

    def check(self, tail: ObjectTail) -> None:
        """Raise DamagedStoreError unless ``tail`` belongs to the expected object."""
        label = tail.label
        if label.store_id != self.store_id:
            raise DamagedStoreError(f"belongs to another store ({label.store_id}, expected {self.store_id})")
        if not any(self.place.accepts(place) for place in label.places):
            raise DamagedStoreError(f"belongs to {label.places}, not to {self.place}")
        if self.tokens is not None and label.tokens != self.tokens:
            raise DamagedStoreError("was computed from other tokens than the store holds")
        if self.record is not None and self.record != tail.record:
            raise DamagedStoreError(f"is not the one in the ledger: {tail.record}, expected {self.record}")


class Scratch(threading.local):
    """A thread's own buffers, grown as needed and used again."""

    def __init__(self) -> None:
        self._stored = np.empty(0, np.uint8)
        self._chunk = np.empty(0, np.uint8)

    def stored(self, nbytes: int) -> np.ndarray:
        """Return (nbytes,) uint8 for stored bytes."""
        if self._stored.size < nbytes:
            self._stored = np.empty(nbytes, np.uint8)
        return self._stored[:nbytes]

    def chunk(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array for one decoded chunk."""
        nbytes = int(np.prod(shape)) * dtype.itemsize
        if self._chunk.size < nbytes:
            self._chunk = np.empty(nbytes, np.uint8)
        return self._chunk[:nbytes].view(dtype).reshape(shape)


@dataclass(frozen=True, slots=True, eq=False)
class StoredObject:
    """An open object whose tail was checked. Threads may share it."""

    key: str
    reader: ObjectReader
    tail: ObjectTail

    def decode(self, slot: int, chain: CodecChain, out: np.ndarray) -> None:
        """Decode the chunk of a slot into ``out``; DamagedStoreError naming the object when it is absent or altered."""
        row, chunk = divmod(slot, self.tail.crcs.shape[1])
        begin, end = self.tail.bounds[row, chunk : chunk + 2].tolist()
        if not end:
            raise DamagedStoreError(f"object {self.key} lacks the chunk in slot {slot}")
        stored = memoryview(self.reader.read(begin, end - begin))
        try:
            if len(stored) != end - begin:
                raise DamagedStoreError(f"chunk has {len(stored)} of {end - begin} bytes")
            chain.decode(stored, out, crc=self.tail.crcs.item(row, chunk))
        except DamagedStoreError as error:
            raise DamagedStoreError(f"object {self.key}, slot {slot}: {error}") from error

    def chunks(self, scratch: Scratch) -> Iterator[tuple[int, memoryview]]:
        """Yield every stored chunk with its slot, in the order of the object's bytes; see `read_chunks`."""
        begins, ends = self.tail.bounds[:, :-1].ravel(), self.tail.bounds[:, 1:].ravel()
        slots = np.flatnonzero(ends)
        slots = slots[np.argsort(begins[slots], kind="stable")]
        edges = [*begins[slots].tolist(), int(ends.max(initial=0))]
        return zip(slots.tolist(), self.read_chunks(edges, scratch), strict=True)

    def read_chunks(self, edges: Sequence[int], scratch: Scratch) -> Iterator[memoryview]:
        """Yield neighbouring chunks, each [edges[i], edges[i + 1]), about 1 MiB of them read at a time.

        So they are still in the processor's cache when they are decoded. Each is good until the next is asked for.
        DamagedStoreError when the object ends early, OSError when it cannot be read.
        """
        begin = end = edges[0]
        view = memoryview(b"")
        for low, high in pairwise(edges):
            if low == end:
                begin, end = end, max(high, edges[bisect_right(edges, end + _WINDOW_BYTES) - 1])
                view = memoryview(scratch.stored(end - begin))
                count = self.reader.read_into(view, begin)
                if count != end - begin:
                    raise DamagedStoreError(f"object {self.key} ends {end - begin - count} bytes early")
            yield view[low - begin : high - begin]


def open_object(storage: Storage, key: str, grid: ShardGrid, expected: Expected) -> StoredObject:
    """Open an object and check its tail; DamagedStoreError naming the key when it is missing or wrong."""
    try:
        reader = storage.open(key)
    except FileNotFoundError as error:
        raise DamagedStoreError(f"object {key} is missing from {storage}") from error
    try:
        tail = read_tail(reader, grid)
        expected.check(tail)
    except DamagedStoreError as error:
        reader.close()
        raise DamagedStoreError(f"object {key} {error}") from error
    return StoredObject(key, reader, tail)
