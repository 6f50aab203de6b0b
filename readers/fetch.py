"""Fetching: byte ranges of stored objects, decoded straight into the batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numcodecs import blosc

from dspark_store.format.codecs import CRC_BYTES, CodecChain, Plain
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.grid import ShardGrid
from dspark_store.format.objects import Scratch, StoredObject
from dspark_store.readers.plan import ByteRun, RowSpan, byte_runs
from dspark_store.readers.threads import ForkSafeLock
from dspark_store.readers.verified import Verify, verified_chunks

DEFAULT_OPEN_OBJECTS = 256

# Many threads decode at once, each a chunk: blosc's own threads would only get in their way.
blosc.set_nthreads(1)


type ObjectName = tuple[str, int, int]
"""An object of the store: its column, shard, and slot of the layer, 0 where a column has none."""


class ObjectPool:
    """Open objects by name, at most ``limit`` of them; the least recently used one is let go."""

    def __init__(self, limit: int = DEFAULT_OPEN_OBJECTS) -> None:
        self._limit = limit
        self._objects: OrderedDict[ObjectName, StoredObject] = OrderedDict()
        self._lock = ForkSafeLock()

    def get(self, name: ObjectName, opening: Callable[[ObjectName], StoredObject]) -> StoredObject:
        """Return an object, which ``opening`` opens and checks when it is first asked for.

        An object that is let go stays open as long as somebody reads it.
        """
        with self._lock:
            if name in self._objects:
                self._objects.move_to_end(name)
                return self._objects[name]
        opened = opening(name)
        with self._lock:
            self._objects[name] = opened
            while len(self._objects) > self._limit:
                self._objects.popitem(last=False)
        return opened

    def close(self) -> None:
        """Let every object go."""
        with self._lock:
            self._objects.clear()


class Piece(NamedTuple):
    """One chunk on its way: its row and place in it, where it is decoded, and what of that is copied on, if anything.

    ``into`` is (T, ...) in the stored dtype. It is the place itself where a whole chunk fits there; else scratch, and
    ``copy`` holds (source, place).
    """

    row: int
    chunk: int
    into: np.ndarray
    copy: tuple[np.ndarray, np.ndarray] | None


class Fetcher:
    """Reads spans of objects of one column into a batch.

    ``target`` is the batch, (B, K, positions, ...) in the stored dtype and with any strides. With ``verify`` off,
    checksums are not looked at; see `Verify`.
    """

    def __init__(
        self, grid: ShardGrid, chain: CodecChain, target: np.ndarray, *, store_id: str, verify: Verify
    ) -> None:
        self._grid = grid
        self._chain = chain
        self._target = target
        self._store_id, self._verify = store_id, verify
        self._plain = isinstance(chain.compressor, Plain)
        self._direct = target[0, 0].flags.c_contiguous if target.size else False
        self._chunk_shape = (grid.chunk_tokens, *target.shape[3:])

    def fetch(self, stored: StoredObject, layer: int, spans: tuple[RowSpan, ...], scratch: Scratch) -> None:
        """Fetch the spans of one object, which is ``layer`` of the batch.

        DamagedStoreError naming the object when a chunk is absent or altered.
        """
        try:
            runs = byte_runs(stored.tail.bounds, spans)
        except ValueError as error:
            raise DamagedStoreError(f"object {stored.key} {error}") from error
        known = verified_chunks(self._store_id, stored) if self._verify else None
        for run in runs:
            version = stored.reader.version()  # before the bytes: what changes between is another version next time
            slots = [(span.row * self._grid.chunks_per_row + span.first, span.last - span.first) for span in run.spans]
            check = known is not None and (
                self._verify is True or not all(known.holds(version, *part) for part in slots)
            )
            if not self._plain:
                self._read_and_decode(stored, layer, run, scratch, check=check)
            elif not check:
                for span in run.spans:
                    self._read_positions(stored, layer, span, scratch)
            elif self._direct:
                pieces = [piece for span in run.spans for piece in self._pieces(layer, span, None)]
                self._read_uncompressed(stored, pieces, scratch)
            else:
                for piece in (piece for span in run.spans for piece in self._pieces(layer, span, scratch)):
                    self._read_uncompressed(stored, [piece], scratch)
            if check and known is not None:
                for part in slots:
                    known.add(version, *part)
        for span in spans:
            wanted = span.wanted
            end = wanted.place + wanted.stop - wanted.start
            if end < wanted.room:
                self._target[wanted.batch, layer, end : wanted.room] = 0

    def _read_and_decode(
        self, stored: StoredObject, layer: int, run: ByteRun, scratch: Scratch, *, check: bool
    ) -> None:
        """Read some neighbouring chunks, decode them while they are in the processor's cache, then the next ones."""
        edges = [run.begin]
        for span in run.spans:
            edges += stored.tail.bounds[span.row, span.first + 1 : span.last + 1].tolist()
        pieces = (piece for span in run.spans for piece in self._pieces(layer, span, scratch))
        for piece, chunk in zip(pieces, stored.read_chunks(edges, scratch), strict=True):
            crc = stored.tail.crcs.item(piece.row, piece.chunk) if check else None
            try:
                self._chain.decode(chunk, piece.into, crc=crc)
            except DamagedStoreError as error:
                raise _in_slot(stored, piece, error) from error
            _finish(piece)

    def _read_positions(self, stored: StoredObject, layer: int, span: RowSpan, scratch: Scratch) -> None:
        """Read just the wanted positions of uncompressed chunks to their places, with one vectored read.

        Between two chunks stands a checksum, which nobody looks at here. Where the places of a chunk's positions do not
        stand side by side, each position is a buffer of its own.
        """
        step, wanted = self._grid.chunk_tokens, span.wanted
        target, skipped = self._target[wanted.batch, layer], scratch.stored(CRC_BYTES)
        buffers: list[np.ndarray] = []
        for low in range(span.first * step, span.last * step, step):
            begin, end = max(low, wanted.start), min(low + step, wanted.stop)
            place = target[begin - wanted.start + wanted.place : end - wanted.start + wanted.place]
            buffers += [skipped] if buffers else []
            buffers += [place] if self._direct else list(place)
        inside = max(0, wanted.start - span.first * step) * target[:1].nbytes
        count = sum(buffer.nbytes for buffer in buffers)
        offset = stored.tail.bounds.item(span.row, span.first) + inside
        _require(stored.reader.read_vector(buffers, offset), count, stored.key)

    def _read_uncompressed(self, stored: StoredObject, pieces: Sequence[Piece], scratch: Scratch) -> None:
        """Read neighbouring chunks with one vectored read: values to where they belong, checksums beside."""
        checksums = scratch.stored(CRC_BYTES * len(pieces)).reshape(-1, CRC_BYTES)
        buffers = [part for piece, crc in zip(pieces, checksums, strict=True) for part in (piece.into, crc)]
        begin = stored.tail.bounds.item(pieces[0].row, pieces[0].chunk)
        wanted = sum(buffer.nbytes for buffer in buffers)
        _require(stored.reader.read_vector(buffers, begin), wanted, stored.key)
        for piece, crc in zip(pieces, checksums, strict=True):
            try:
                self._chain.check_split(piece.into, crc, stored.tail.crcs.item(piece.row, piece.chunk))
            except DamagedStoreError as error:
                raise _in_slot(stored, piece, error) from error
            _finish(piece)

    def _pieces(self, layer: int, span: RowSpan, scratch: Scratch | None) -> Iterator[Piece]:
        """Yield a span's chunks. With ``scratch`` they are decoded one by one and may share it."""
        step, wanted, shape = self._grid.chunk_tokens, span.wanted, self._chunk_shape
        target = self._target[wanted.batch, layer]
        for chunk in range(span.first, span.last):
            low = chunk * step
            place = low - wanted.start + wanted.place
            if self._direct and low >= wanted.start and place + step <= wanted.room:
                yield Piece(span.row, chunk, target[place : place + step], None)
                continue
            into = np.empty(shape, target.dtype) if scratch is None else scratch.chunk(shape, target.dtype)
            begin, end = max(low, wanted.start), min(low + step, wanted.stop)
            there = target[place + begin - low : place + end - low]
            yield Piece(span.row, chunk, into, (into[begin - low : end - low], there))


def _finish(piece: Piece) -> None:
    if piece.copy is not None:
        source, place = piece.copy
        place[...] = source


def _require(count: int, wanted: int, key: str) -> None:
    if count != wanted:
        raise DamagedStoreError(f"object {key} ends {wanted - count} bytes early")


def _in_slot(stored: StoredObject, piece: Piece, error: DamagedStoreError) -> DamagedStoreError:
    slot = piece.row * stored.tail.crcs.shape[1] + piece.chunk
    return DamagedStoreError(f"object {stored.key}, slot {slot}: {error}")
