"""One stored object: its tail against what ought to stand there, and its chunks in the order of its bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.grid import ShardGrid
from dspark_store.format.objects import Expected
from dspark_store.format.shard import ObjectTail, read_tail
from dspark_store.format.storage import ObjectReader, Storage
from dspark_store.readers.fetch import Scratch
from dspark_store.readers.plan import chunk_bounds

_WINDOW_BYTES = 1024 * 1024
_SCRATCH = Scratch()


@dataclass(frozen=True, slots=True, eq=False)
class OpenedObject:
    """An open object whose tail was checked."""

    key: str
    reader: ObjectReader
    tail: ObjectTail

    def chunks(self) -> Iterator[tuple[int, memoryview]]:
        """Yield every stored chunk with its slot, in the order of the object's bytes; each until the next is asked for.

        DamagedStoreError when the object ends early, OSError when it cannot be read.
        """
        slots = np.flatnonzero(self.tail.present)
        slots = slots[np.argsort(self.tail.offsets[slots], kind="stable")]
        begins = self.tail.offsets[slots].astype(np.int64)
        ends = begins + self.tail.sizes[slots].astype(np.int64)
        begin = end = 0
        view = memoryview(b"")
        for at, slot in enumerate(slots.tolist()):
            if ends[at] > end:
                begin = int(begins[at])
                last = int(np.searchsorted(ends, begin + _WINDOW_BYTES, "right")) - 1
                end = int(ends[max(at, last)])
                view = memoryview(_SCRATCH.stored(end - begin))
                count = self.reader.read_into(view, begin)
                if count != end - begin:
                    raise DamagedStoreError(f"ends {end - begin - count} bytes early")
            yield slot, view[int(begins[at]) - begin : int(ends[at]) - begin]


def open_checked(
    storage: Storage, key: str, grid: ShardGrid, expected: Expected, rows: int, sizes: Collection[int] = ()
) -> OpenedObject:
    """Open an object and check its tail: size, label, layout and number of rows.

    ``sizes`` are those that it may have, any if there are none. DamagedStoreError or OSError, without the key, when it
    is missing or not what is expected.
    """
    reader = storage.open(key)
    try:
        if sizes and reader.size not in sizes:
            raise DamagedStoreError(f"has {reader.size:,} bytes, the ledger says {min(sizes):,}")
        tail = read_tail(reader, grid.slots)
        expected.check(tail)
        _check_layout(tail, grid)
        if tail.label.rows != rows:
            raise DamagedStoreError(f"holds {tail.label.rows} rows, expected {rows}")
    except BaseException:
        reader.close()
        raise
    return OpenedObject(key, reader, tail)


def _check_layout(tail: ObjectTail, grid: ShardGrid) -> None:
    """Raise DamagedStoreError unless the chunks of a row stand side by side and in order."""
    try:
        chunk_bounds(tail.offsets, tail.sizes, grid.chunks_per_row)
    except ValueError as error:
        raise DamagedStoreError(str(error)) from error


def decoding_buffer(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return this thread's buffer for one decoded chunk."""
    return _SCRATCH.chunk(shape, dtype)
