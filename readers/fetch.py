"""Fetching: byte ranges of stored objects, decoded straight into the batch."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numcodecs import blosc

from dspark_store.format.codecs import CRC_BYTES, CodecChain, Plain
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.grid import ShardGrid
from dspark_store.format.objects import Expected, StoredObject, open_object
from dspark_store.format.storage import Storage
from dspark_store.readers.forks import ProcessLock
from dspark_store.readers.plan import ByteRun, RowSpan, byte_runs

DEFAULT_OPEN_OBJECTS = 256
_WINDOW_BYTES = 1024 * 1024

# Many threads decode at once, each a chunk: blosc's own threads would only get in their way.
blosc.set_nthreads(1)


class ObjectPool:
    """Open objects with their checked tails, at most ``limit`` of them; the least recently used one is let go."""

    def __init__(self, storage: Storage, limit: int = DEFAULT_OPEN_OBJECTS) -> None:
        self._storage = storage
        self._limit = limit
        self._objects: OrderedDict[str, StoredObject] = OrderedDict()
        self._lock = ProcessLock()

    def get(self, key: str, slots: int, expected: Expected) -> StoredObject:
        """Return the object at ``key``, opened and checked when it is first asked for.

        An object that is let go stays open as long as somebody reads it.
        """
        with self._lock:
            if key in self._objects:
                self._objects.move_to_end(key)
                return self._objects[key]
        stored = _packed(open_object(self._storage, key, slots, expected))
        with self._lock:
            self._objects[key] = stored
            while len(self._objects) > self._limit:
                self._objects.popitem(last=False)
        return stored

    def close(self) -> None:
        """Let every object go."""
        with self._lock:
            self._objects.clear()


def _packed(stored: StoredObject) -> StoredObject:
    """Shrink an object's tail to what reading needs: a third, where objects are smaller than 4 GiB."""
    tail = stored.tail
    offsets, sizes = (values.astype(np.min_scalar_type(values.max())) for values in (tail.offsets, tail.sizes))
    return replace(stored, tail=replace(tail, offsets=offsets, sizes=sizes, crcs=tail.crcs.copy()))


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


class Piece(NamedTuple):
    """One chunk on its way: its slot, where it is decoded, and what of that is copied on to its place, if anything.

    ``into`` is (T, ...) in the stored dtype. It is the place itself where a whole chunk fits there; else scratch, and
    ``copy`` holds (source, place).
    """

    slot: int
    into: np.ndarray
    copy: tuple[np.ndarray, np.ndarray] | None


class Fetcher:
    """Reads spans of objects of one column into a batch.

    ``target`` is the batch, (B, K, positions, ...) in the stored dtype and with any strides. With ``verify`` off,
    checksums are not looked at.
    """

    def __init__(self, grid: ShardGrid, chain: CodecChain, target: np.ndarray, *, verify: bool) -> None:
        self._grid = grid
        self._chain = chain
        self._target = target
        self._verify = verify
        self._plain = isinstance(chain.compressor, Plain)
        self._direct = target[0, 0].flags.c_contiguous if target.size else False

    def fetch(self, stored: StoredObject, layer: int, spans: tuple[RowSpan, ...], scratch: Scratch) -> None:
        """Fetch the spans of one object, which is ``layer`` of the batch.

        DamagedStoreError naming the object when a chunk is absent or altered.
        """
        try:
            runs = byte_runs(stored.tail.offsets, stored.tail.sizes, spans)
        except ValueError as error:
            raise DamagedStoreError(f"object {stored.key} {error}") from error
        for run in runs:
            if not self._plain:
                self._read_and_decode(stored, layer, run, scratch)
            elif not self._verify:
                for span in run.spans:
                    self._read_positions(stored, layer, span, scratch)
            elif self._direct:
                pieces = [piece for span in run.spans for piece in self._pieces(layer, span, None)]
                self._read_uncompressed(stored, pieces, scratch)
            else:
                for piece in (piece for span in run.spans for piece in self._pieces(layer, span, scratch)):
                    self._read_uncompressed(stored, [piece], scratch)
            for span in run.spans:
                wanted = span.wanted
                end = wanted.place + wanted.stop - wanted.start
                self._target[wanted.batch, layer, end : wanted.room] = 0

    def _read_and_decode(self, stored: StoredObject, layer: int, run: ByteRun, scratch: Scratch) -> None:
        """Read some neighbouring chunks, decode them while they are in the processor's cache, then the next ones."""
        slots = [slot for span in run.spans for slot in range(span.first, span.last)]
        ends = (run.begin + np.cumsum(stored.tail.sizes[slots])).tolist()
        begin = end = run.begin
        view = memoryview(b"")
        for span in run.spans:
            for piece in self._pieces(layer, span, scratch):
                offset, size = int(stored.tail.offsets[piece.slot]), int(stored.tail.sizes[piece.slot])
                if offset == end:
                    begin, end = end, max(end + size, ends[bisect_right(ends, end + _WINDOW_BYTES) - 1])
                    data = scratch.stored(end - begin)
                    _require(stored.reader.read_into(data, begin), len(data), stored.key)
                    view = memoryview(data)
                chunk = view[offset - begin : offset - begin + size]
                crc = int(stored.tail.crcs[piece.slot]) if self._verify else None
                try:
                    self._chain.decode(chunk, piece.into, crc=crc)
                except DamagedStoreError as error:
                    raise DamagedStoreError(f"object {stored.key}, slot {piece.slot}: {error}") from error
                _finish(piece)

    def _read_positions(self, stored: StoredObject, layer: int, span: RowSpan, scratch: Scratch) -> None:
        """Read just the wanted positions of uncompressed chunks to their places, with one vectored read.

        Between two chunks stands a checksum, which nobody looks at here. Where the places of a chunk's positions do not
        stand side by side, each position is a buffer of its own.
        """
        step, wanted = self._grid.chunk_tokens, span.wanted
        target, skipped = self._target[wanted.batch, layer], scratch.stored(CRC_BYTES)
        buffers: list[np.ndarray] = []
        for slot in range(span.first, span.last):
            low = slot % self._grid.chunks_per_row * step
            begin, end = max(low, wanted.start), min(low + step, wanted.stop)
            place = target[begin - wanted.start + wanted.place : end - wanted.start + wanted.place]
            buffers += [skipped] if buffers else []
            buffers += [place] if self._direct else list(place)
        chunk_start = span.first % self._grid.chunks_per_row * step
        inside = max(0, wanted.start - chunk_start) * target[:1].nbytes
        count = sum(buffer.nbytes for buffer in buffers)
        _require(stored.reader.read_vector(buffers, int(stored.tail.offsets[span.first]) + inside), count, stored.key)

    def _read_uncompressed(self, stored: StoredObject, pieces: Sequence[Piece], scratch: Scratch) -> None:
        """Read neighbouring chunks with one vectored read: values to where they belong, checksums beside."""
        checksums = scratch.stored(CRC_BYTES * len(pieces)).reshape(-1, CRC_BYTES)
        buffers = [part for piece, crc in zip(pieces, checksums, strict=True) for part in (piece.into, crc)]
        begin, wanted = int(stored.tail.offsets[pieces[0].slot]), sum(buffer.nbytes for buffer in buffers)
        _require(stored.reader.read_vector(buffers, begin), wanted, stored.key)
        for piece, crc in zip(pieces, checksums, strict=True):
            if self._verify:
                try:
                    self._chain.check_split(piece.into, crc, int(stored.tail.crcs[piece.slot]))
                except DamagedStoreError as error:
                    raise DamagedStoreError(f"object {stored.key}, slot {piece.slot}: {error}") from error
            _finish(piece)

    def _pieces(self, layer: int, span: RowSpan, scratch: Scratch | None) -> Iterator[Piece]:
        """Yield a span's chunks. With ``scratch`` they are decoded one by one and may share it."""
        step, wanted = self._grid.chunk_tokens, span.wanted
        target = self._target[wanted.batch, layer]
        for slot in range(span.first, span.last):
            low = slot % self._grid.chunks_per_row * step
            place = low - wanted.start + wanted.place
            if self._direct and low >= wanted.start and place + step <= wanted.room:
                yield Piece(slot, target[place : place + step], None)
                continue
            shape = (step, *target.shape[1:])
            into = np.empty(shape, target.dtype) if scratch is None else scratch.chunk(shape, target.dtype)
            begin, end = max(low, wanted.start), min(low + step, wanted.stop)
            there = target[place + begin - low : place + end - low]
            yield Piece(slot, into, (into[begin - low : end - low], there))


def _finish(piece: Piece) -> None:
    if piece.copy is not None:
        source, place = piece.copy
        place[...] = source


def _require(count: int, wanted: int, key: str) -> None:
    if count != wanted:
        raise DamagedStoreError(f"object {key} ends {wanted - count} bytes early")
