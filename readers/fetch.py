"""Fetching: byte ranges of stored objects, decoded straight into the batch."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numcodecs import blosc

from dspark_store.format.codecs import CRC_BYTES, CodecChain, Plain
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.grid import ShardGrid
from dspark_store.format.objects import Expected, StoredObject, open_object
from dspark_store.format.storage import Storage
from dspark_store.readers.plan import ByteRun, RowSpan, byte_runs, chunk_range

DEFAULT_OPEN_OBJECTS = 256

# Many threads decode at once, each a chunk: blosc's own threads would only get in their way.
blosc.set_nthreads(1)


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


@dataclass(frozen=True, slots=True)
class Piece:
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

    def fetch(self, stored: StoredObject, spans: tuple[RowSpan, ...], scratch: Scratch) -> None:
        """Fetch the spans of one object; DamagedStoreError naming it when a chunk is absent or altered."""
        try:
            runs = byte_runs(self._grid, stored.tail.offsets, stored.tail.sizes, spans)
        except ValueError as error:
            raise DamagedStoreError(f"object {stored.key} {error}") from error
        for run in runs:
            if not self._plain:
                self._read_and_decode(stored, run, scratch)
            elif self._direct:
                pieces = [piece for span in run.spans for piece in self._pieces(span, None)]
                self._read_uncompressed(stored, pieces, scratch)
            else:
                for piece in (piece for span in run.spans for piece in self._pieces(span, scratch)):
                    self._read_uncompressed(stored, [piece], scratch)
            for span in run.spans:
                wanted = span.wanted
                end = wanted.place + wanted.stop - wanted.start
                self._target[wanted.batch, span.layer, end : wanted.room] = 0

    def _read_and_decode(self, stored: StoredObject, run: ByteRun, scratch: Scratch) -> None:
        data = scratch.stored(run.end - run.begin)
        _require(stored.reader.read_into(data, run.begin), len(data), stored.key)
        view = memoryview(data)
        for span in run.spans:
            for piece in self._pieces(span, scratch):
                begin = int(stored.tail.offsets[piece.slot]) - run.begin
                chunk = view[begin : begin + int(stored.tail.sizes[piece.slot])]
                crc = int(stored.tail.crcs[piece.slot]) if self._verify else None
                try:
                    self._chain.decode(chunk, piece.into, crc=crc)
                except DamagedStoreError as error:
                    raise DamagedStoreError(f"object {stored.key}, slot {piece.slot}: {error}") from error
                _finish(piece)

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

    def _pieces(self, span: RowSpan, scratch: Scratch | None) -> Iterator[Piece]:
        """Yield a span's chunks. With ``scratch`` they are decoded one by one and may share it."""
        step, wanted = self._grid.chunk_tokens, span.wanted
        target = self._target[wanted.batch, span.layer]
        first, last = chunk_range(self._grid, span)
        for slot in range(first, last):
            low = (slot - span.row * self._grid.chunks_per_row) * step
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
