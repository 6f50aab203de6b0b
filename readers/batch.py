"""Reading batches: every column's spans become reads, which run side by side into the batch's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from types import MappingProxyType
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
from dspark_store.readers.fetch import Fetch, Fetcher, Verify, check_verify
from dspark_store.readers.foreign import ForeignColumn
from dspark_store.readers.index import StoreIndex
from dspark_store.readers.plan import ObjectRead, RowSpan, SampleSpan, object_reads, plan_spans
from dspark_store.readers.ranges import Buffers, LocalRanges, ObjectName
from dspark_store.readers.tensors import Conversion, state_view
from dspark_store.readers.threads import Pending, Workers
from dspark_store.readers.tokens import TokenColumns

_REQUEST_BYTES = 8 * 1024 * 1024

type _Request = tuple[str, ObjectRead, Callable[[], None] | None]
"""A column, what is read of one of its objects, and what is done after."""


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
        self._columns = TokenColumns(record.schema, index, pad_token_id)
        self._verify = check_verify(verify)
        self._ranges = LocalRanges(self._open, threads=threads, in_flight=in_flight, open_objects=open_objects)
        self._foreign_threads = Workers(threads, "foreign")
        self._buffers = Buffers()
        self._scratch = Scratch()

    def read(self, spans: Sequence[SampleSpan], slots: Sequence[int], batch: Mapping[str, torch.Tensor]) -> None:
        """Fill the batch's tensors, by column, each (B, positions, ...) or, for stacked layers, (B, K, positions, H).

        States are converted to a tensor's dtype; int8 tensors, W wide, get the codes of a store that has them. Where no
        span lands, ids are the pad token id and everything else is zero. DamagedStoreError and OSError name column,
        sample, shard and object; ValueError a sample that is not captured yet.
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
        """Put the requests of a batch into the first stage; see `SpanReader` and `read`."""
        states = {name: state_view(name, batch[name], self._schema) for name in (LAYERS, LAST) if name in batch}
        rows, place_tokens = self._columns.begin(spans, batch)

        def complete() -> T:
            place_tokens()
            return finish()

        pending = Pending(complete)
        requests = chain(self._state_requests(spans, slots, states), self._token_requests(spans, rows))
        conversions = {name: Conversion.to(self._schema, name, batch[name].dtype) for name in states}
        self._submit(requests, states | rows, pending, conversions)
        return pending

    def keep_tokens(self, columns: Sequence[str]) -> None:
        """See `TokenColumns.keep`."""
        self._columns.keep(columns, self._start_rows)

    def _start_rows(self, spans: Sequence[SampleSpan], rows: Mapping[str, np.ndarray]) -> Pending[None]:
        pending = Pending(lambda: None)
        self._submit(self._token_requests(spans, rows), rows, pending)
        return pending

    def close(self) -> None:
        """Let go of threads, open objects and kept tokens; the next read takes new ones."""
        self._columns.drop()
        self._ranges.close()
        self._foreign_threads.close()
        self._buffers.close()

    def _token_requests(self, spans: Sequence[SampleSpan], rows: Mapping[str, np.ndarray]) -> Iterator[_Request]:
        """Yield the requests that fill rows, (spans, 1, S) by column: whole ones are read, since each is one chunk."""
        if rows:
            plan = plan_spans(self._tokens, self._columns.whole([span.sample for span in spans]), _REQUEST_BYTES // 4)
            yield from ((column, read, None) for column in rows for read in object_reads(plan, [0]))

    def _state_requests(
        self, spans: Sequence[SampleSpan], slots: Sequence[int], targets: Mapping[str, np.ndarray]
    ) -> Iterator[_Request]:
        """Yield the requests that fill states; what is a layer and the last states both is read once, as the latter."""
        position_bytes = self._schema.stored.hidden_size * self._schema.stored.dtype.itemsize
        plan = plan_spans(self._states, spans, _REQUEST_BYTES // position_bytes) if targets else []
        filled = {span.batch for span in spans if span.stop > span.start}
        both = targets.keys() >= {LAYERS, LAST} and not {LAYERS, LAST} & self._foreign.keys()
        for column, target in targets.items():
            for batch in set(range(len(target))) - filled:
                target[batch] = 0
            for read in object_reads(plan, [0] if column == LAST else slots):
                after = None
                if both and column == LAST:
                    copies = [at for at, slot in enumerate(slots) if self._index.is_shared(read.shard, slot)]
                    after = partial(_copy_layers, read, copies, targets) if copies else None
                if not (both and column == LAYERS and self._index.is_shared(read.shard, read.slot)):
                    yield column, read, after

    def _submit(
        self,
        requests: Iterable[_Request],
        targets: Mapping[str, np.ndarray],
        pending: Pending[Any],
        conversions: Mapping[str, Conversion | None] = MappingProxyType({}),
    ) -> None:
        """Have requests fill the ``targets``, (B, K, positions, ...) by column; ``pending`` gets the errors."""
        begin = {
            column: self._beginning(column, target, pending, conversions.get(column))
            for column, target in targets.items()
        }
        error: BaseException | None = None
        try:
            for column, read, after in requests:
                pending.expect()
                try:
                    begin[column](read, after)
                except BaseException:  # an interrupt while it waits for room: nobody else ends this one
                    pending.done()
                    raise
        except BaseException as failed:  # noqa: BLE001 - raised where somebody waits for the batch
            error = failed
        pending.done(error)

    def _beginning(
        self, column: str, target: np.ndarray, pending: Pending[Any], conversion: Conversion | None
    ) -> Callable[[ObjectRead, Callable[[], None] | None], None]:
        """Return what begins to read an object of a column into ``target``."""
        if column in self._foreign:
            fetch = partial(self._fetch_foreign, column, target, conversion, pending)
            return lambda read, _: self._foreign_threads.put(lambda: fetch(read))
        fetcher = Fetcher(
            column,
            self._grid(column),
            self._schema.chain(column),
            target,
            self._record.store_id,
            self._verify,
            self._buffers,
            self._scratch,
            self._blame,
            conversion,
        )
        return lambda read, after: self._ranges.submit(Fetch(fetcher, read, pending, after))

    def _fetch_foreign(
        self, column: str, target: np.ndarray, conversion: Conversion | None, pending: Pending[Any], read: ObjectRead
    ) -> None:
        failed: BaseException | None = None
        try:
            for span in () if pending.stopped else read.spans:
                wanted = span.wanted
                row, end = target[wanted.batch, read.layer], wanted.place + wanted.stop - wanted.start
                values = place = row[wanted.place : end]
                if conversion is not None:
                    values = np.empty((len(place), conversion.width), conversion.stored.stored)
                try:
                    self._foreign[column].fetch(wanted.sample, read.slot, wanted.start, wanted.stop, values)
                except (DamagedStoreError, OSError) as error:
                    raise self._located(error, column, read, [span]) from error
                if conversion is not None:
                    conversion(values, read.slot, place)
                row[end : wanted.room] = 0
        except BaseException as error:  # noqa: BLE001 - raised where somebody waits for the batch
            failed = error
        pending.done(failed)

    def _blame(self, fetch: Fetch, error: DamagedStoreError | OSError) -> BaseException:
        """Return an error that names the sample that is hit: of several, each is read once more by itself."""
        read = fetch.read
        for span in read.spans if len(read.spans) > 1 else ():
            again = Fetch(fetch.fetcher, read._replace(spans=(span,)), fetch.pending)
            try:
                self._ranges.fetch_now(again)
                again.decode()
            except (DamagedStoreError, OSError) as found:
                error, read = found, again.read
                break
            finally:
                again.release()
        located = self._located(error, fetch.fetcher.column, read, read.spans)
        located.__cause__ = error
        return located

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


def _copy_layers(read: ObjectRead, layers: Sequence[int], targets: Mapping[str, np.ndarray]) -> None:
    """Copy last hidden states to the captured layers that are the very same object."""
    for layer in layers:
        for wanted in (span.wanted for span in read.spans):
            place = slice(wanted.place, wanted.room)
            targets[LAYERS][wanted.batch, layer, place] = targets[LAST][wanted.batch, 0, place]
