"""Reading batches: every column's spans become reads, which run side by side into the batch's tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch

from dspark_store.format.damage import DamagedStoreError, remedy
from dspark_store.format.grid import ShardGrid
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.objects import Expected, Scratch, StoredObject, open_object
from dspark_store.format.schema import IDS, LAST, LAYERS, MASK, TOKEN_OBJECTS, object_key
from dspark_store.format.shard import Place
from dspark_store.format.storage import Storage
from dspark_store.readers.fetch import Fetch, Fetcher
from dspark_store.readers.foreign import ForeignColumn
from dspark_store.readers.index import StoreIndex
from dspark_store.readers.plan import (
    ObjectRead,
    RowSpan,
    SampleSpan,
    object_reads,
    padded_spans,
    plan_spans,
)
from dspark_store.readers.ranges import Buffers, LocalRanges, ObjectName, Range
from dspark_store.readers.tensors import state_view
from dspark_store.readers.threads import Pending, Workers
from dspark_store.readers.verified import Verify, check_verify

_REQUEST_BYTES = 8 * 1024 * 1024
KEPT_TOKEN_BYTES = 64 * 1024 * 1024
"""Token columns up to this size are read whole when a loader starts: they would be a third of all requests."""
_SHARDS_AT_ONCE = 8
_TOKEN_DTYPES: Mapping[str, np.dtype] = {IDS: np.dtype("<i4"), MASK: np.dtype("u1")}

type _Task = Callable[[Pending[Any]], None]


class SpanReader(Protocol):
    """What fills a batch: `BatchReader`, or a live target in a store's place."""

    def read(self, spans: Sequence[SampleSpan], slots: Sequence[int], batch: Mapping[str, torch.Tensor]) -> None:
        """Fill the batch's tensors, by column, with spans of samples in the layer ``slots``."""
        ...

    def start[T](
        self,
        spans: Sequence[SampleSpan],
        slots: Sequence[int],
        batch: Mapping[str, torch.Tensor],
        finish: Callable[[], T],
    ) -> Pending[T]:
        """Begin to fill the tensors; the result is what ``finish`` returns when they are full. This one fills them."""
        self.read(spans, slots, batch)
        return Pending.of(finish())

    def keep_tokens(self, columns: Sequence[str]) -> None:
        """Keep these token columns in memory, whole, if they are small. This one keeps none."""
        del columns

    def close(self) -> None:
        """Let go of threads and open objects; the next read takes new ones."""
        ...


class BatchReader(SpanReader):
    """Fills tensors with spans of samples. Threads may share it."""

    def __init__(
        self,
        storage: Storage,
        record: StoreRecord,
        index: StoreIndex,
        foreign: Mapping[str, ForeignColumn],
        *,
        pad_token_id: int,
        verify: Verify,
        threads: int,
        in_flight: int,
        open_objects: int,
    ) -> None:
        self._storage = storage
        self._record = record
        self._schema = record.schema
        self._tokens, self._states = record.schema.tokens, record.schema.states
        self._index = index
        self._foreign = foreign
        self._pad_token_id = pad_token_id
        self._verify = check_verify(verify)
        self._decoders = Workers(threads, "decode")
        self._decoding = threading.Semaphore(threads)
        self._ranges = LocalRanges(self._open, in_flight, open_objects)
        self._buffers = Buffers()
        self._scratch = Scratch()
        self._kept: Mapping[str, np.ndarray] = {}

    def read(self, spans: Sequence[SampleSpan], slots: Sequence[int], batch: Mapping[str, torch.Tensor]) -> None:
        """Fill the batch's tensors, by column, each (B, positions, ...) or, for stacked layers, (B, K, positions, H).

        Where no span lands, ids are the pad token id and everything else is zero. DamagedStoreError and OSError name
        column, sample, shard and object; ValueError a sample that is not captured yet.
        """
        pending = self.start(spans, slots, batch, lambda: None)
        try:
            pending.wait()
        except BaseException:  # an interrupt: nobody writes into the tensors any more when this has been raised
            pending.cancel()
            pending.wait()
            raise
        pending.result()

    def start[T](
        self,
        spans: Sequence[SampleSpan],
        slots: Sequence[int],
        batch: Mapping[str, torch.Tensor],
        finish: Callable[[], T],
    ) -> Pending[T]:
        """Put the reads of a batch into the first stage; see `SpanReader` and `read`."""
        tokens = {name: values.numpy() for name, values in batch.items() if name in (IDS, MASK)}
        states = {
            name: state_view(name, values, self._schema) for name, values in batch.items() if name in (LAYERS, LAST)
        }
        rows = {
            column: np.zeros((len(spans), 1, self._schema.seq_length), _TOKEN_DTYPES[column])
            for column in tokens.keys() - self._kept.keys()
        }
        kept = {column: self._kept[column] for column in tokens.keys() - rows.keys()}

        def place_tokens() -> T:
            for column, target in tokens.items():
                target[...] = self._pad_token_id if column == IDS else 0
                for number, span in enumerate(spans):
                    values = rows[column][number, 0] if column in rows else kept[column][self._tokens_of(span.sample)]
                    place = slice(span.place, span.place + span.stop - span.start)
                    target[span.batch, place] = values[span.start : span.stop]
            return finish()

        pending = Pending(place_tokens)
        error: BaseException | None = None
        try:
            for task in chain(self._state_reads(spans, slots, states), self._token_reads(spans, rows)):
                pending.expect()
                task(pending)
        except BaseException as failed:  # noqa: BLE001 - raised where somebody waits for the batch
            error = failed
        pending.done(error)
        return pending

    def keep_tokens(self, columns: Sequence[str]) -> None:
        """Read these token columns whole if they take at most ``KEPT_TOKEN_BYTES``, and keep them until `close`.

        Where one cannot be read whole, none is kept: its damage is an error of the batch that needs it.
        """
        wanted: dict[str, np.dtype] = {column: _TOKEN_DTYPES[column] for column in columns if column in _TOKEN_DTYPES}
        token_bytes = sum(_TOKEN_DTYPES[column].itemsize for column in wanted)
        total = int(self._token_starts[-1])
        if wanted.keys() <= self._kept.keys() or total * token_bytes > KEPT_TOKEN_BYTES:
            return
        kept = {column: np.empty(total, dtype) for column, dtype in wanted.items()}
        shards = range(self._tokens.num_shards)
        for first in shards[::_SHARDS_AT_ONCE]:
            begun = [self._start_tokens(shard, kept) for shard in shards[first : first + _SHARDS_AT_ONCE]]
            for pending in begun:
                pending.wait()
            try:
                for pending in begun:
                    pending.result()
            except (DamagedStoreError, OSError):
                return
        self._kept = kept

    def _start_tokens(self, shard: int, kept: Mapping[str, np.ndarray]) -> Pending[None]:
        samples, seq_length = self._tokens.rows(shard), self._schema.seq_length
        lengths = self._index.length[samples.start : samples.stop].tolist()
        batch = {column: torch.empty((len(samples), seq_length), dtype=torch.int64) for column in kept}

        def keep() -> None:
            for column, values in kept.items():
                for row, sample in enumerate(samples):
                    values[self._tokens_of(sample)] = batch[column][row, : lengths[row]].numpy()

        return self.start(padded_spans(samples, lengths, 0, seq_length), [], batch, keep)

    @cached_property
    def _token_starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self._index.length, dtype=np.int64)])

    def _tokens_of(self, sample: int) -> slice:
        return slice(*self._token_starts[sample : sample + 2].tolist())

    def close(self) -> None:
        """Let go of threads, open objects and kept tokens; the next read takes new ones."""
        self._kept = {}
        self._ranges.close()
        self._decoders.close()
        self._buffers.close()

    def _token_reads(self, spans: Sequence[SampleSpan], rows: Mapping[str, np.ndarray]) -> Iterator[_Task]:
        """Yield a task per request. Whole rows are read, since each is one chunk: ``rows`` are (spans, 1, S)."""
        if not rows:
            return
        samples = [span.sample for span in spans]
        whole = padded_spans(samples, self._index.length[samples].tolist(), 0, self._schema.seq_length)
        plan = plan_spans(self._tokens, whole, _REQUEST_BYTES // 4)
        for column, target in rows.items():
            fetch = self._fetching(column, target)
            for read in object_reads(plan, [0]):
                yield partial(fetch, read)

    def _state_reads(
        self, spans: Sequence[SampleSpan], slots: Sequence[int], targets: Mapping[str, np.ndarray]
    ) -> Iterator[_Task]:
        """Yield a task per request. What is both a layer and the last hidden states is read once, as the latter."""
        position_bytes = self._schema.hidden_size * self._schema.dtype.itemsize
        plan = plan_spans(self._states, spans, _REQUEST_BYTES // position_bytes) if targets else []
        both = targets.keys() >= {LAYERS, LAST} and not {LAYERS, LAST} & self._foreign.keys()
        for column, target in targets.items():
            for batch in set(range(len(target))) - {span.batch for span in spans if span.stop > span.start}:
                target[batch] = 0
            fetch = self._fetching(column, target)
            for read in object_reads(plan, [0] if column == LAST else slots):
                if not both:
                    yield partial(fetch, read)
                elif column == LAST:
                    copies = [at for at, slot in enumerate(slots) if self._index.is_shared(read.shard, slot)]
                    after = partial(_copy_layers, read, copies, targets) if copies else None
                    yield partial(fetch, read, after=after)
                elif not self._index.is_shared(read.shard, read.slot):
                    yield partial(fetch, read)

    def _fetching(self, column: str, target: np.ndarray) -> Callable[..., None]:
        """Return what has an object of a column read into ``target``, (B, K, positions, ...)."""
        if column in self._foreign:
            return partial(self._start_foreign, column, target)
        fetcher = Fetcher(
            self._grid(column),
            self._schema.chain(column),
            target,
            store_id=self._record.store_id,
            verify=self._verify,
            buffers=self._buffers,
            scratch=self._scratch,
        )
        return partial(self._start_request, column, fetcher)

    def _start_request(
        self,
        column: str,
        fetcher: Fetcher,
        read: ObjectRead,
        pending: Pending[object],
        after: Callable[[], None] | None = None,
    ) -> None:
        self._ranges.submit(_Request(self, column, fetcher, read, pending, after))

    def _start_foreign(self, column: str, target: np.ndarray, read: ObjectRead, pending: Pending[object]) -> None:
        def run() -> None:
            try:
                if not pending.stopped:
                    self._fetch_foreign(column, target, read)
            except BaseException as error:  # noqa: BLE001 - raised where somebody waits for the batch
                pending.done(error)
            else:
                pending.done()

        self._decoders.put(run)

    def _arrived(self, request: _Request, error: BaseException | None) -> None:
        """Pass a request on to the second stage: in this thread while fewer decode than may, else to the next free one.

        Handing over takes longer than decoding what is small, and what just came is still in this core's cache.
        """
        if request.fetch.is_placed:
            self._decode(request, error)
        elif self._decoding.acquire(blocking=False):
            try:
                self._decode(request, error)
            finally:
                self._decoding.release()
        else:
            self._decoders.put(lambda: self._decode_in_turn(request, error))

    def _decode_in_turn(self, request: _Request, error: BaseException | None) -> None:
        with self._decoding:
            self._decode(request, error)

    def _decode(self, request: _Request, error: BaseException | None) -> None:
        try:
            if not request.pending.stopped:
                if error is not None:
                    raise error
                request.fetch.decode()
                if request.after is not None:
                    request.after()
            error = None
        except (DamagedStoreError, OSError) as failed:
            error = self._named(request, failed)
        except BaseException as failed:  # noqa: BLE001 - raised where somebody waits for the batch
            error = failed
        self._over(request, error)

    def _over(self, request: _Request, error: BaseException | None) -> None:
        request.fetch.release()
        self._ranges.release(request.nbytes)
        request.pending.done(error)

    def _named(self, request: _Request, error: DamagedStoreError | OSError) -> BaseException:
        """Return an error that names the sample that is hit: of several, each is read once more by itself."""
        for span in request.read.spans if len(request.read.spans) > 1 else ():
            one = request.read._replace(spans=(span,))
            again = _Request(self, request.column, request.fetcher, one, request.pending, None)
            try:
                self._ranges.fetch_now(again)
                again.fetch.decode()
            except (DamagedStoreError, OSError) as found:
                return _caused(self._located(found, request.column, one, [span]), found)
            finally:
                again.fetch.release()
        return _caused(self._located(error, request.column, request.read, request.read.spans), error)

    def _fetch_foreign(self, column: str, target: np.ndarray, read: ObjectRead) -> None:
        for span in read.spans:
            wanted = span.wanted
            row, end = target[wanted.batch, read.layer], wanted.place + wanted.stop - wanted.start
            place = row[wanted.place : end]
            try:
                self._foreign[column].fetch(wanted.sample, read.slot, wanted.start, wanted.stop, place)
            except (DamagedStoreError, OSError) as error:
                raise self._located(error, column, read, [span]) from error
            row[end : wanted.room] = 0

    def _located(
        self, error: DamagedStoreError | OSError, column: str, read: ObjectRead, spans: Sequence[RowSpan]
    ) -> Exception:
        """Return an error of the same kind that says which column, layer, samples, shard and object it hit."""
        samples = [span.wanted.sample for span in spans]
        hit = f"sample {samples[0]}" if len(samples) == 1 else f"samples {min(samples)} to {max(samples)}"
        if isinstance(error, FileNotFoundError) and not self._record.complete:
            return ValueError(f"{hit} is in shard {read.shard}, which is not captured yet")
        layer = self._schema.layer_id(read.slot) if column == LAYERS else None
        where = f"{column if layer is None else f'{column}, layer {layer}'}, {hit} (shard {read.shard})"
        if not isinstance(error, OSError):
            return DamagedStoreError(f"{where}: {error}; {remedy(self._storage)}")
        key = column if column in self._foreign else object_key(column, read.shard, read.slot)
        if error.errno is None:
            return OSError(f"{where}: cannot read {key} of {self._storage}: {error}")
        return OSError(error.errno, f"{where}: cannot read {key} of {self._storage}: {error.strerror}")

    def _grid(self, column: str) -> ShardGrid:
        return self._tokens if column in (IDS, MASK) else self._states

    def _open(self, name: ObjectName) -> StoredObject:
        column, shard, slot = name
        if column in (IDS, MASK):
            position, layer = TOKEN_OBJECTS.index(column), None
        else:
            position = len(TOKEN_OBJECTS) + (self._schema.num_layers if column == LAST else slot)
            layer = self._schema.layer_id(slot) if column == LAYERS else None
        record = self._index.object_record(shard, position)
        expected = Expected(self._record.store_id, Place(column, slot, layer, shard), record)
        return open_object(self._storage, object_key(column, shard, slot), self._grid(column), expected)


class _Request:
    """A `RangeRequest` of a batch: its way through the two stages."""

    def __init__(
        self,
        reader: BatchReader,
        column: str,
        fetcher: Fetcher,
        read: ObjectRead,
        pending: Pending[object],
        after: Callable[[], None] | None,
    ) -> None:
        self._reader, self.column, self.fetcher, self.read = reader, column, fetcher, read
        self.pending, self.after = pending, after
        self.fetch = Fetch(fetcher, read)
        self.name: ObjectName = (column, read.shard, read.slot)
        self.nbytes = self.fetch.nbytes

    def ranges(self, stored: StoredObject) -> Sequence[Range]:
        """See `RangeRequest`; nothing is read for a batch that failed or is not wanted any more."""
        return () if self.pending.stopped else self.fetch.ranges(stored)

    def arrived(self, error: BaseException | None) -> None:
        """See `RangeRequest`."""
        self._reader._arrived(self, error)


def _copy_layers(read: ObjectRead, layers: Sequence[int], targets: Mapping[str, np.ndarray]) -> None:
    """Copy last hidden states to the captured layers that are the very same object."""
    for layer in layers:
        for wanted in (span.wanted for span in read.spans):
            place = slice(wanted.place, wanted.room)
            targets[LAYERS][wanted.batch, layer, place] = targets[LAST][wanted.batch, 0, place]


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error
