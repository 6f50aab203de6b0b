"""The second stage of reading: what came of an object is checked, and decoded straight into the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numcodecs import blosc

from dspark_store.format.codecs import CRC_BYTES, CodecChain, Plain
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.grid import ShardGrid
from dspark_store.format.objects import Scratch, StoredObject
from dspark_store.format.shard import ObjectTail
from dspark_store.readers.plan import ByteRun, ObjectRead, RowSpan, byte_runs
from dspark_store.readers.ranges import Buffers, Range
from dspark_store.readers.verified import Verify, verified_chunks

_GAP_BYTES = 64 * 1024
"""Bytes that are read and dropped rather than left out by one request more: what a local request costs."""
_LEAST_BUFFER = 4 * 1024
"""Bytes of a position from which on a buffer for each is faster than a copy of the row."""

# Many threads decode at once, each a chunk: blosc's own threads would only get in their way.
blosc.set_nthreads(1)
_SKIPPED = np.empty(CRC_BYTES, np.uint8)  # where checksums go at which nobody looks


class Fetcher:
    """Reads of objects of one column into a batch.

    ``target`` is the batch, (B, K, positions, ...) in the stored dtype and with any strides. See `Verify`.
    """

    def __init__(
        self,
        grid: ShardGrid,
        chain: CodecChain,
        target: np.ndarray,
        *,
        store_id: str,
        verify: Verify,
        buffers: Buffers,
        scratch: Scratch,
    ) -> None:
        self.grid, self.chain, self.target = grid, chain, target
        self.store_id, self.verify = store_id, verify
        self.buffers, self.scratch = buffers, scratch
        position = target[:1, :1, :1]
        self.direct = target[0, 0].flags.c_contiguous if target.size else False
        self.in_place = isinstance(chain.compressor, Plain) and (self.direct or position.nbytes >= _LEAST_BUFFER)
        """Whether stored values can be read to their places as they are, when nobody checks them."""
        self.chunk_bytes = grid.chunk_tokens * position.nbytes + CRC_BYTES


class Fetch:
    """One request: spans of an object, first as `ranges` of bytes, then decoded."""

    def __init__(self, fetcher: Fetcher, read: ObjectRead) -> None:
        self._fetcher = fetcher
        self._read = read
        self._staged: list[tuple[ByteRun, np.ndarray]] = []
        self._check = False
        self.nbytes = sum(span.last - span.first for span in read.spans) * fetcher.chunk_bytes

    def ranges(self, stored: StoredObject) -> Sequence[Range]:
        """Return the ranges to read, into memory of their own or, where nothing is to be done, to their places."""
        fetcher, tail, spans = self._fetcher, stored.tail, self._read.spans
        try:
            runs = byte_runs(tail.bounds, spans, _GAP_BYTES)
        except ValueError as error:
            raise DamagedStoreError(f"object {stored.key} {error}") from error
        self._key, self._tail = stored.key, tail
        if fetcher.verify:
            self._known = verified_chunks(fetcher.store_id, stored)
            self._version = stored.reader.version()  # before the bytes: what changes between is another next time
            self._check = fetcher.verify is True or not all(
                self._known.holds(self._version, *self._slots(span)) for span in spans
            )
        if fetcher.in_place and not self._check:
            return [self._positions(tail, span) for span in spans]
        self._staged = [(run, fetcher.buffers.take(run.end - run.begin)) for run in runs]
        return [Range(run.begin, [buffer[: run.end - run.begin]]) for run, buffer in self._staged]

    def _slots(self, span: RowSpan) -> tuple[int, int]:
        return span.row * self._fetcher.grid.chunks_per_row + span.first, span.last - span.first

    def _positions(self, tail: ObjectTail, span: RowSpan) -> Range:
        """Return the range of just the wanted positions of uncompressed chunks, and their places.

        Between two chunks stands a checksum, which nobody looks at here. Where the places of a chunk's positions do not
        stand side by side, each position is a buffer of its own.
        """
        step, wanted = self._fetcher.grid.chunk_tokens, span.wanted
        target = self._fetcher.target[wanted.batch, self._read.layer]
        buffers: list[np.ndarray] = []
        for low in range(span.first * step, span.last * step, step):
            begin, end = max(low, wanted.start), min(low + step, wanted.stop)
            place = target[begin - wanted.start + wanted.place : end - wanted.start + wanted.place]
            buffers += [_SKIPPED] if buffers else []
            buffers += [place] if self._fetcher.direct else list(place)
        inside = max(0, wanted.start - span.first * step) * target[:1].nbytes
        return Range(tail.bounds.item(span.row, span.first) + inside, buffers)

    @property
    def is_placed(self) -> bool:
        """Whether the values are where they belong already, so that `decode` has only to make zero what follows."""
        return not self._staged

    def release(self) -> None:
        """Give the memory of what came back."""
        for _, buffer in self._staged:
            self._fetcher.buffers.give(buffer)
        self._staged = []

    def decode(self) -> None:
        """Decode what came, and make zero what follows a span; DamagedStoreError naming object and slot."""
        for run, buffer in self._staged:
            for span in run.spans:
                self._decode_span(span, memoryview(buffer), run.begin)
        target = self._fetcher.target
        for wanted in (span.wanted for span in self._read.spans):
            end = wanted.place + wanted.stop - wanted.start
            if end < wanted.room:
                target[wanted.batch, self._read.layer, end : wanted.room] = 0
        if self._check:
            for span in self._read.spans:
                self._known.add(self._version, *self._slots(span))

    def _decode_span(self, span: RowSpan, view: memoryview, begin: int) -> None:
        fetcher, wanted, step = self._fetcher, span.wanted, self._fetcher.grid.chunk_tokens
        target = fetcher.target[wanted.batch, self._read.layer]
        shape = (step, *target.shape[1:])
        edges = self._tail.bounds[span.row, span.first : span.last + 1].tolist()
        for number, chunk in enumerate(range(span.first, span.last)):
            low = chunk * step
            place = low - wanted.start + wanted.place
            whole = fetcher.direct and low >= wanted.start and place + step <= wanted.room
            into = target[place : place + step] if whole else fetcher.scratch.chunk(shape, target.dtype)
            stored = view[edges[number] - begin : edges[number + 1] - begin]
            try:
                if isinstance(fetcher.chain.compressor, Plain) and not whole:
                    if self._check:
                        fetcher.chain.check(stored, self._tail.crcs.item(span.row, chunk))
                    into = np.frombuffer(stored[:-CRC_BYTES], target.dtype).reshape(shape)
                else:
                    crc = self._tail.crcs.item(span.row, chunk) if self._check else None
                    fetcher.chain.decode(stored, into, crc=crc)
            except (DamagedStoreError, ValueError) as error:
                slot = span.row * self._tail.crcs.shape[1] + chunk
                raise DamagedStoreError(f"object {self._key}, slot {slot}: {error}") from error
            if not whole:
                first, last = max(low, wanted.start), min(low + step, wanted.stop)
                target[place + first - low : place + last - low] = into[first - low : last - low]
