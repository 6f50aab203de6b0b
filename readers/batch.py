"""Reading batches: every column's spans become reads, which run side by side into the batch's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from dspark_store.format.damage import DamagedStoreError, remedy
from dspark_store.format.grid import ShardGrid
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.objects import Expected, Scratch, StoredObject, open_object
from dspark_store.format.schema import IDS, LAST, LAYERS, MASK, TOKEN_OBJECTS, object_key
from dspark_store.format.shard import Place
from dspark_store.format.storage import Storage
from dspark_store.readers.fetch import Fetcher, ObjectName, ObjectPool
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
from dspark_store.readers.tensors import state_view
from dspark_store.readers.threads import ReadThreads
from dspark_store.readers.verified import Verify, check_verify

_READ_BYTES = 16 * 1024 * 1024


class SpanReader(Protocol):
    """What fills a batch: `BatchReader`, or a live target in a store's place."""

    def read(self, spans: Sequence[SampleSpan], slots: Sequence[int], batch: Mapping[str, torch.Tensor]) -> None:
        """Fill the batch's tensors, by column, with spans of samples in the layer ``slots``."""
        ...

    def close(self) -> None:
        """Let go of threads and open objects; the next read takes new ones."""
        ...


class BatchReader:
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
        if open_objects < 1:
            raise ValueError(f"open_objects must be >= 1, got {open_objects}")
        # a thread may hold one more object, which it just opened, or which was let go while it reads
        self._objects = ObjectPool(max(1, open_objects - threads))
        self._threads = ReadThreads(threads)
        self._scratch = Scratch()

    def read(self, spans: Sequence[SampleSpan], slots: Sequence[int], batch: Mapping[str, torch.Tensor]) -> None:
        """Fill the batch's tensors, by column, each (B, positions, ...) or, for stacked layers, (B, K, positions, H).

        Where no span lands, ids are the pad token id and everything else is zero. DamagedStoreError and OSError name
        column, sample, shard and object; ValueError a sample that is not captured yet.
        """
        tokens = {name: values.numpy() for name, values in batch.items() if name in (IDS, MASK)}
        states = {
            name: state_view(name, values, self._schema) for name, values in batch.items() if name in (LAYERS, LAST)
        }
        rows = {
            column: np.zeros((len(spans), 1, self._schema.seq_length), "<i4" if column == IDS else "u1")
            for column in tokens
        }
        self._threads.run([*self._state_tasks(spans, slots, states), *self._token_tasks(spans, rows)])
        for column, target in tokens.items():
            target[...] = self._pad_token_id if column == IDS else 0
            for span, row in zip(spans, rows[column][:, 0], strict=True):
                target[span.batch, span.place : span.place + span.stop - span.start] = row[span.start : span.stop]

    def close(self) -> None:
        """Let go of threads and open objects; the next read takes new ones."""
        self._threads.close()
        self._objects.close()

    def _token_tasks(self, spans: Sequence[SampleSpan], rows: Mapping[str, np.ndarray]) -> Iterator[Callable[[], None]]:
        """Yield a task an object. Whole rows are read, since each is one chunk: ``rows`` are (spans, 1, S)."""
        if not rows:
            return
        samples = [span.sample for span in spans]
        whole = padded_spans(samples, self._index.length[samples].tolist(), 0, self._schema.seq_length)
        plan = plan_spans(self._tokens, whole, _READ_BYTES // 4)
        for column, target in rows.items():
            fetch = self._fetching(column, target)
            for read in object_reads(plan, [0]):
                yield partial(fetch, read)

    def _state_tasks(
        self, spans: Sequence[SampleSpan], slots: Sequence[int], targets: Mapping[str, np.ndarray]
    ) -> Iterator[Callable[[], None]]:
        """Yield a task an object. What is both a layer and the last hidden states is read once, as the latter."""
        position_bytes = self._schema.hidden_size * self._schema.dtype.itemsize
        plan = plan_spans(self._states, spans, _READ_BYTES // position_bytes) if targets else []
        both = targets.keys() >= {LAYERS, LAST} and not {LAYERS, LAST} & self._foreign.keys()
        for column, target in targets.items():
            for batch in set(range(len(target))) - {span.batch for span in spans if span.stop > span.start}:
                target[batch] = 0
            fetch = self._fetching(column, target)
            for read in object_reads(plan, [0] if column == LAST else slots):
                if not both:
                    yield partial(fetch, read)
                elif column == LAST:
                    yield partial(self._fetch_both, fetch, read, slots, targets)
                elif not self._index.is_shared(read.shard, read.slot):
                    yield partial(fetch, read)

    def _fetch_both(
        self,
        fetch: Callable[[ObjectRead], None],
        read: ObjectRead,
        slots: Sequence[int],
        targets: Mapping[str, np.ndarray],
    ) -> None:
        """Read last hidden states, and copy them to the captured layers that are the very same object."""
        fetch(read)
        for layer, slot in enumerate(slots):
            if self._index.is_shared(read.shard, slot):
                for wanted in (span.wanted for span in read.spans):
                    place = slice(wanted.place, wanted.room)
                    targets[LAYERS][wanted.batch, layer, place] = targets[LAST][wanted.batch, 0, place]

    def _fetching(self, column: str, target: np.ndarray) -> Callable[[ObjectRead], None]:
        """Return what reads an object of a column into ``target``, (B, K, positions, ...)."""
        if column in self._foreign:
            return partial(self._fetch_foreign, column, target)
        chain, store_id = self._schema.chain(column), self._record.store_id
        fetcher = Fetcher(self._grid(column), chain, target, store_id=store_id, verify=self._verify)
        return partial(self._fetch, column, fetcher)

    def _fetch(self, column: str, fetcher: Fetcher, read: ObjectRead) -> None:
        try:
            stored = self._objects.get((column, read.shard, read.slot), self._open)
        except (DamagedStoreError, OSError) as error:
            raise self._located(error, column, read, read.spans) from error
        try:
            fetcher.fetch(stored, read.layer, read.spans, self._scratch)
        except (DamagedStoreError, OSError) as error:
            for span in read.spans:  # once more, one by one, to name the sample that is hit
                try:
                    fetcher.fetch(stored, read.layer, (span,), self._scratch)
                except (DamagedStoreError, OSError) as again:
                    raise self._located(again, column, read, [span]) from again
            raise self._located(error, column, read, read.spans) from error

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
