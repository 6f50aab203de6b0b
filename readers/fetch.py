"""One request of a batch: where the bytes of an object go, and how they are checked and decoded into their places."""

from __future__ import annotations

import math
from collections.abc import Buffer, Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Literal

import numpy as np
from numcodecs import blosc

from dspark_store.format.codecs import CRC_BYTES, CodecChain, Plain
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.grid import ShardGrid
from dspark_store.format.objects import Scratch, StoredObject
from dspark_store.readers.plan import ByteRun, ObjectRead, RowSpan, byte_runs
from dspark_store.readers.ranges import Buffers, ObjectName, Range
from dspark_store.readers.tensors import Conversion
from dspark_store.readers.threads import ForkSafeLock, Pending

type Verify = bool | Literal["first"]
"""When checksums are looked at: True at every read, "first" at the first one of this process, False never."""

_GAP_BYTES = 64 * 1024
"""Bytes that are read and dropped rather than left out by one request more: what a local request costs."""
_LEAST_BUFFER = 12 * 1024
"""Bytes of a position from which on a buffer for each is faster than a copy of the row; measured from 128 B to 16 KiB.

The copy takes 1/9 of the time at 128 B, 1/2 at 1 KiB, 4/5 at 5 KiB, the same at 10 KiB.
"""

# Many threads decode at once, each a chunk: blosc's own threads would only get in their way.
blosc.set_nthreads(1)
_SKIPPED = np.empty(_GAP_BYTES, np.uint8)  # where bytes go at which nobody looks


def check_verify(verify: Verify) -> Verify:
    """Return ``verify``; ValueError when it is none of the three."""
    if not isinstance(verify, bool) and verify != "first":
        raise ValueError(f'verify is {verify!r}; choose from True, "first", False')
    return verify


class VerifiedChunks:
    """The chunks of one object that were checked in this process, a bit each, while its version stays the same."""

    def __init__(self) -> None:
        self._version: Hashable = None
        self._bits = 0
        self._lock = ForkSafeLock()

    def holds(self, version: Hashable, first: int, count: int) -> bool:
        """Tell whether ``count`` chunks from slot ``first`` on were all checked in this version of the object."""
        wanted = (1 << count) - 1
        return self._version == version and self._bits >> first & wanted == wanted

    def add(self, version: Hashable, first: int, count: int) -> None:
        """Note that ``count`` chunks from slot ``first`` on were checked; another version begins anew."""
        with self._lock.held:
            if self._version != version:
                self._bits = 0
                self._version = version
            self._bits |= (1 << count) - 1 << first


_verified: dict[tuple[str, str], VerifiedChunks] = {}
_lock = ForkSafeLock()


def _verified_chunks(store_id: str, stored: StoredObject) -> VerifiedChunks:
    """Return what this process knows of an object: by the store's id and the object's key, whoever opened it."""
    if stored.reader.version() is None:
        return VerifiedChunks()  # it may change unseen: what is known ends with this opening
    with _lock.held:
        return _verified.setdefault((store_id, stored.key), VerifiedChunks())


@dataclass(frozen=True)
class Fetcher:
    """What the requests of one column of a batch share.

    ``target`` is the column in the batch, (B, K, positions, ...) with any strides, in the stored dtype or what
    ``conversion`` makes of it; ``blame`` gives an error that names column, layer, sample, shard and object.
    """

    column: str
    grid: ShardGrid
    chain: CodecChain
    target: np.ndarray
    store_id: str
    verify: Verify
    buffers: Buffers
    scratch: Scratch
    blame: Callable[[Fetch, DamagedStoreError | OSError], BaseException]
    conversion: Conversion | None = None

    @cached_property
    def direct(self) -> bool:
        """Whether positions of a row stand side by side in the batch, so that a chunk can be decoded in place."""
        return self.target[0, 0].flags.c_contiguous if self.conversion is None and self.target.size else False

    @property
    def stored(self) -> np.dtype:
        """The dtype of stored values."""
        return self.target.dtype if self.conversion is None else self.conversion.stored.stored

    @property
    def position(self) -> tuple[int, ...]:
        """The shape of a stored position."""
        return self.target.shape[3:] if self.conversion is None else (self.conversion.width,)

    def place(self, values: np.ndarray, slot: int, target: np.ndarray) -> None:
        """Put stored values of a layer slot where they belong."""
        if self.conversion is None:
            target[...] = values
        else:
            self.conversion(values, slot, target)

    @cached_property
    def plain(self) -> bool:
        """Whether stored values are those of the batch as they are."""
        return isinstance(self.chain.compressor, Plain)

    @cached_property
    def position_bytes(self) -> int:
        """Decoded bytes of a position."""
        return math.prod(self.position) * self.stored.itemsize

    @cached_property
    def chunk_bytes(self) -> int:
        """Stored bytes of a plain chunk; of others about the most."""
        return self.grid.chunk_tokens * self.position_bytes + CRC_BYTES


class Fetch:
    """A `RangeRequest`: spans of an object, first as `ranges` of bytes, then decoded; ``after`` follows that."""

    def __init__(
        self, fetcher: Fetcher, read: ObjectRead, pending: Pending[object], after: Callable[[], None] | None = None
    ) -> None:
        self.fetcher, self.read, self.pending, self._after = fetcher, read, pending, after
        self.name: ObjectName = (fetcher.column, read.shard, read.slot)
        self.nbytes = sum(span.last - span.first for span in read.spans) * fetcher.chunk_bytes
        self._staged: list[tuple[ByteRun, np.ndarray]] = []
        self._placed: list[tuple[int, np.ndarray, Buffer]] = []
        self._check = False

    def ranges(self, stored: StoredObject) -> Sequence[Range]:
        """See `RangeRequest`: memory of their own or, where nothing is to be decoded, their places in the batch.

        Nothing is read for a batch that failed or is not wanted any more.
        """
        if self.pending.stopped:
            return ()
        fetcher, tail, spans = self.fetcher, stored.tail, self.read.spans
        try:
            runs = byte_runs(tail.bounds, spans, _GAP_BYTES)
        except ValueError as error:
            raise DamagedStoreError(f"object {stored.key} {error}") from error
        self._key, self._tail = stored.key, tail
        if fetcher.verify:
            self._known = _verified_chunks(fetcher.store_id, stored)
            self._version = stored.reader.version()  # before the bytes: what changes between is another next time
            self._check = fetcher.verify is True or not all(
                self._known.holds(self._version, *self._slots(span)) for span in spans
            )
        if fetcher.plain and fetcher.conversion is None and self._fits_in_place():
            return _joined([self._in_place(span) for span in spans])
        self._staged = [(run, fetcher.buffers.take(run.end - run.begin)) for run in runs]
        return [Range(run.begin, [buffer[: run.end - run.begin]]) for run, buffer in self._staged]

    def _slots(self, span: RowSpan) -> tuple[int, int]:
        return span.row * self.fetcher.grid.chunks_per_row + span.first, span.last - span.first

    def _fits_in_place(self) -> bool:
        """Tell whether plain values are read to their places; for a checksum, whole chunks must have room there.

        Chunks of another size than plain ones have are staged, where decoding refuses them.
        """
        for row, first, last, _ in self.read.spans:
            begin, *ends = self._tail.bounds[row, first : last + 1].tolist()
            if ends != [begin + self.fetcher.chunk_bytes * (number + 1) for number in range(last - first)]:
                return False
        if self._check:
            return self.fetcher.direct and all(whole for span in self.read.spans for *_, whole in self._chunks(span))
        return self.fetcher.direct or self.fetcher.position_bytes >= _LEAST_BUFFER

    def _chunks(self, span: RowSpan) -> Iterator[tuple[int, int, bool]]:
        """Yield a span's chunks: its first position, where that stands in the batch, whether all of it has room."""
        step, wanted = self.fetcher.grid.chunk_tokens, span.wanted
        for low in range(span.first * step, span.last * step, step):
            place = low - wanted.start + wanted.place
            yield low, place, low >= wanted.start and place + step <= wanted.room

    def _in_place(self, span: RowSpan) -> Range:
        """Return the range of plain values, and their places: of whole chunks to check, else of wanted positions.

        Between two chunks stands a checksum. Where the positions of a chunk do not stand side by side in the batch,
        each is a buffer of its own.
        """
        step, wanted = self.fetcher.grid.chunk_tokens, span.wanted
        target = self.fetcher.target[wanted.batch, self.read.layer]
        buffers: list[np.ndarray] = []
        for slot, (low, place, _) in enumerate(self._chunks(span), self._slots(span)[0]):
            if self._check:
                values, checksum = target[place : place + step], np.empty(CRC_BYTES, np.uint8)
                buffers += [values, checksum]
                self._placed.append((slot, values, checksum))
            else:
                begin, end = max(low, wanted.start), min(low + step, wanted.stop)
                values = target[begin - low + place : end - low + place]
                buffers += [_SKIPPED[:CRC_BYTES]] if buffers else []
                buffers += [values] if self.fetcher.direct else list(values)
        inside = max(0, wanted.start - span.first * step) * self.fetcher.position_bytes
        return Range(self._tail.bounds.item(span.row, span.first) + inside, buffers)

    def arrived(self, error: BaseException | None) -> None:
        """See `RangeRequest`."""
        try:
            if not self.pending.stopped:
                if error is not None:
                    raise error
                self.decode()
                if self._after is not None:
                    self._after()
            error = None
        except (DamagedStoreError, OSError) as failed:
            error = self.fetcher.blame(self, failed)
        except BaseException as failed:  # noqa: BLE001 - raised where somebody waits for the batch
            error = failed
        self.release()
        self.pending.done(error)

    def release(self) -> None:
        """Give the memory of what came back."""
        for _, buffer in self._staged:
            self.fetcher.buffers.give(buffer)
        self._staged = []

    def decode(self) -> None:
        """Decode what came, and make zero what follows a span; DamagedStoreError naming object and slot."""
        for slot, values, checksum in self._placed:
            try:
                self.fetcher.chain.check_split(values, checksum, self._tail.crcs.item(slot))
            except DamagedStoreError as error:
                raise self._damaged(slot, error) from error
        for run, buffer in self._staged:
            for span in run.spans:
                self._decode_span(span, memoryview(buffer), run.begin)
        for wanted in (span.wanted for span in self.read.spans):
            end = wanted.place + wanted.stop - wanted.start
            if end < wanted.room:
                self.fetcher.target[wanted.batch, self.read.layer, end : wanted.room] = 0
        if self._check:
            for span in self.read.spans:
                self._known.add(self._version, *self._slots(span))

    def _decode_span(self, span: RowSpan, view: memoryview, begin: int) -> None:
        fetcher, wanted, step = self.fetcher, span.wanted, self.fetcher.grid.chunk_tokens
        target = fetcher.target[wanted.batch, self.read.layer]
        shape, dtype = (step, *fetcher.position), fetcher.stored
        edges = self._tail.bounds[span.row, span.first : span.last + 1].tolist()
        for number, (low, place, whole) in enumerate(self._chunks(span)):
            in_place = whole and fetcher.direct
            stored, slot = view[edges[number] - begin : edges[number + 1] - begin], self._slots(span)[0] + number
            crc = self._tail.crcs.item(slot) if self._check else None
            try:
                if fetcher.plain and not in_place:
                    if crc is not None:
                        fetcher.chain.check(stored, crc)
                    values = np.frombuffer(stored[:-CRC_BYTES], dtype).reshape(shape)
                else:
                    values = target[place : place + step] if in_place else fetcher.scratch.chunk(shape, dtype)
                    fetcher.chain.decode(stored, values, crc=crc)
            except (DamagedStoreError, ValueError) as error:
                raise self._damaged(slot, error) from error
            if not in_place:
                first, last = max(low, wanted.start), min(low + step, wanted.stop)
                begins = place + first - low
                fetcher.place(values[first - low : last - low], self.read.slot, target[begins : begins + last - first])

    def _damaged(self, slot: int, error: Exception) -> DamagedStoreError:
        return DamagedStoreError(f"object {self._key}, slot {slot}: {error}")


def _joined(ranges: list[Range]) -> list[Range]:
    """Return ranges in the order of the object, those in one between which lies a small gap."""
    if len(ranges) == 1:  # as nearly always, in a shuffled batch
        return ranges
    joined: list[Range] = []
    end = -1
    for one in sorted(ranges, key=itemgetter(0)):
        gap = one.offset - end
        if joined and 0 <= gap <= _GAP_BYTES:
            joined[-1] = Range(joined[-1].offset, [*joined[-1].buffers, _SKIPPED[:gap], *one.buffers])
        else:
            joined.append(one)
        end = one.offset + sum(memoryview(buffer).nbytes for buffer in one.buffers)
    return joined
