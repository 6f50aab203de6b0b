"""Reading batches: every column's spans become reads, which run side by side into the batch's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.objects import Expected
from dspark_store.format.schema import IDS, LAST, LAYERS, MASK, TOKEN_OBJECTS, object_key
from dspark_store.format.shard import Place
from dspark_store.format.storage import Storage
from dspark_store.readers.fetch import Fetcher, ObjectPool, Scratch
from dspark_store.readers.foreign import ForeignColumn
from dspark_store.readers.index import StoreIndex
from dspark_store.readers.plan import ObjectRead, SampleSpan, padded_spans, plan_reads
from dspark_store.readers.shapes import state_view
from dspark_store.readers.workers import ReadThreads

_READ_BYTES = 16 * 1024 * 1024


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
        verify: bool,
        threads: int,
        open_objects: int,
    ) -> None:
        self._record = record
        self._schema = record.schema
        self._index = index
        self._foreign = foreign
        self._pad_token_id = pad_token_id
        self._verify = verify
        if open_objects < 1:
            raise ValueError(f"open_objects must be >= 1, got {open_objects}")
        # a thread may hold one more object, which it just opened, or which was let go while it reads
        self._objects = ObjectPool(storage, max(1, open_objects - threads))
        self._threads = ReadThreads(threads)
        self._scratch = Scratch()

    def read(self, spans: Sequence[SampleSpan], slots: Sequence[int], batch: Mapping[str, torch.Tensor]) -> None:
        """Fill the batch's tensors, by column, each (B, positions, ...) or, for stacked layers, (B, K, positions, H).

        Where no span lands, ids are the pad token id and everything else is zero. DamagedStoreError names column,
        sample, shard and object; ValueError a sample that is not captured yet.
        """
        states = {
            name: state_view(name, values, self._schema) for name, values in batch.items() if name in (LAYERS, LAST)
        }
        tasks: list[Callable[[], None]] = []
        for column, target in batch.items():
            if column in (IDS, MASK):
                tasks.append(partial(self._read_tokens, column, spans, target.numpy()))
        for column, values in states.items():
            chosen = [0] if column == LAST else slots
            for read in self._plan(column, spans, chosen, values):
                if column == LAYERS and LAST in states and self._is_last(read.shard, read.slot):
                    continue
                task = self._task(column, read, values)
                if column == LAST and LAYERS in states:
                    task = partial(self._also_as_layer, task, read, slots, states)
                tasks.append(task)
        self._threads.run(tasks)

    def close(self) -> None:
        """Let go of threads and open objects; the next read takes new ones."""
        self._threads.close()
        self._objects.close()

    def _is_last(self, shard: int, slot: int) -> bool:
        """Whether a layer's object is also that of the last hidden states."""
        shared = self._index.is_shared(shard, slot)
        return shared and not {LAYERS, LAST} & self._foreign.keys()

    def _also_as_layer(
        self, task: Callable[[], None], read: ObjectRead, slots: Sequence[int], states: Mapping[str, np.ndarray]
    ) -> None:
        """Read last hidden states, and copy them to the captured layers that are the very same object."""
        task()
        for layer, slot in enumerate(slots):
            if self._is_last(read.shard, slot):
                for wanted in (span.wanted for span in read.spans):
                    place = slice(wanted.place, wanted.room)
                    states[LAYERS][wanted.batch, layer, place] = states[LAST][wanted.batch, 0, place]

    def _plan(
        self, column: str, spans: Sequence[SampleSpan], slots: Sequence[int], target: np.ndarray
    ) -> Iterator[ObjectRead]:
        """Return the reads of a column into ``target``, (B, K, positions, ...); rows without a span become zero."""
        schema = self._schema
        for batch in set(range(len(target))) - {span.batch for span in spans if span.stop > span.start}:
            target[batch] = 0
        grid = schema.tokens if column in (IDS, MASK) else schema.states
        position_bytes = max(1, target.dtype.itemsize * int(np.prod(target.shape[3:])))
        return plan_reads(grid, spans, slots, max(1, _READ_BYTES // position_bytes))

    def _task(self, column: str, read: ObjectRead, target: np.ndarray) -> Callable[[], None]:
        if column in self._foreign:
            return partial(self._fetch_foreign, column, read, target)
        grid = self._schema.tokens if column in (IDS, MASK) else self._schema.states
        fetcher = Fetcher(grid, self._schema.chain(column), target, verify=self._verify)
        return partial(self._fetch, column, fetcher, read)

    def _read_tokens(self, column: str, spans: Sequence[SampleSpan], target: np.ndarray) -> None:
        """Read whole token rows, a chunk each, and copy the spans from them."""
        seq = self._schema.seq_length
        rows = np.empty((len(spans), 1, seq), "<i4" if column == IDS else "u1")
        samples = [span.sample for span in spans]
        whole = padded_spans(samples, self._index.length[samples].tolist(), 0, seq)
        for read in self._plan(column, whole, [0], rows):
            self._task(column, read, rows)()
        target[...] = self._pad_token_id if column == IDS else 0
        for span, row in zip(spans, rows[:, 0], strict=True):
            target[span.batch, span.place : span.place + span.stop - span.start] = row[span.start : span.stop]

    def _fetch(self, column: str, fetcher: Fetcher, read: ObjectRead) -> None:
        key = object_key(column, read.shard, read.slot)
        grid = self._schema.tokens if column in (IDS, MASK) else self._schema.states
        samples = [span.wanted.sample for span in read.spans]
        with self._naming(column, read, samples):
            stored = self._objects.get(key, grid.slots, self._expected(column, read.slot, read.shard))
        try:
            fetcher.fetch(stored, read.layer, read.spans, self._scratch)
        except (DamagedStoreError, OSError):
            for span in read.spans:  # once more, one by one, to name the sample that is hit
                with self._naming(column, read, [span.wanted.sample]):
                    fetcher.fetch(stored, read.layer, (span,), self._scratch)
            with self._naming(column, read, samples):
                raise

    def _fetch_foreign(self, column: str, read: ObjectRead, target: np.ndarray) -> None:
        for span in read.spans:
            wanted = span.wanted
            row, end = target[wanted.batch, read.layer], wanted.place + wanted.stop - wanted.start
            with self._naming(column, read, [wanted.sample]):
                self._foreign[column].fetch(
                    wanted.sample, read.slot, wanted.start, wanted.stop, row[wanted.place : end]
                )
            row[end : wanted.room] = 0

    @contextmanager
    def _naming(self, column: str, read: ObjectRead, samples: Sequence[int]) -> Iterator[None]:
        """Say in errors which column, layer, samples and shard they hit."""
        layer = self._schema.layer_id(read.slot) if column == LAYERS else None
        where = column if layer is None else f"{column}, layer {layer}"
        hit = f"sample {samples[0]}" if len(samples) == 1 else f"samples {min(samples)} to {max(samples)}"
        try:
            yield
        except FileNotFoundError as error:
            raise ValueError(f"{hit} is in shard {read.shard}, which is not captured yet") from error
        except (DamagedStoreError, OSError) as error:
            raise DamagedStoreError(f"{where}, {hit} (shard {read.shard}): {error}") from error

    def _expected(self, column: str, slot: int, shard: int) -> Expected:
        if column in (IDS, MASK):
            position, layer = TOKEN_OBJECTS.index(column), None
        else:
            position = len(TOKEN_OBJECTS) + (self._schema.num_layers if column == LAST else slot)
            layer = self._schema.layer_id(slot) if column == LAYERS else None
        record = self._index.object_record(shard, position)
        return Expected(self._record.store_id, Place(column, slot, layer, shard), record)
