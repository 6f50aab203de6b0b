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
        self._objects = ObjectPool(storage, open_objects)
        self._threads = ReadThreads(threads)
        self._scratch = Scratch()

    def read(self, spans: Sequence[SampleSpan], slots: Sequence[int], batch: Mapping[str, torch.Tensor]) -> None:
        """Fill the batch's tensors, by column, each (B, positions, ...) or, for stacked layers, (B, K, positions, H).

        Where no span lands, ids are the pad token id and everything else is zero. DamagedStoreError names column,
        sample, shard and object; ValueError a sample that is not captured yet.
        """
        tasks: list[Callable[[], None]] = []
        for column, target in batch.items():
            if column in (IDS, MASK):
                tasks.append(partial(self._read_tokens, column, spans, target.numpy()))
            else:
                chosen = [0] if column == LAST else slots
                tasks += self._reads(column, spans, chosen, state_view(column, target, self._schema))
        self._threads.run(tasks)

    def close(self) -> None:
        """Let go of threads and open objects; the next read takes new ones."""
        self._threads.close()
        self._objects.close()

    def _reads(
        self, column: str, spans: Sequence[SampleSpan], slots: Sequence[int], target: np.ndarray
    ) -> list[Callable[[], None]]:
        """Return the reads of a column into ``target``, (B, K, positions, ...) in the stored dtype."""
        schema = self._schema
        for batch in set(range(len(target))) - {span.batch for span in spans if span.stop > span.start}:
            target[batch] = 0
        grid = schema.tokens if column in (IDS, MASK) else schema.states
        position_bytes = max(1, target.dtype.itemsize * int(np.prod(target.shape[3:])))
        reads = plan_reads(grid, spans, slots, max(1, _READ_BYTES // position_bytes))
        if column in self._foreign:
            return [partial(self._fetch_foreign, column, read, target) for read in reads]
        fetcher = Fetcher(grid, schema.chain(column), target, verify=self._verify)
        return [partial(self._fetch, column, fetcher, read) for read in reads]

    def _read_tokens(self, column: str, spans: Sequence[SampleSpan], target: np.ndarray) -> None:
        """Read whole token rows, a chunk each, and copy the spans from them."""
        seq = self._schema.seq_length
        rows = np.empty((len(spans), 1, seq), "<i4" if column == IDS else "u1")
        samples = [span.sample for span in spans]
        for read in self._reads(column, padded_spans(samples, self._index.length[samples].tolist(), 0, seq), [0], rows):
            read()
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
            fetcher.fetch(stored, read.spans, self._scratch)
        except (DamagedStoreError, OSError):
            for span in read.spans:  # once more, one by one, to name the sample that is hit
                with self._naming(column, read, [span.wanted.sample]):
                    fetcher.fetch(stored, (span,), self._scratch)
            raise

    def _fetch_foreign(self, column: str, read: ObjectRead, target: np.ndarray) -> None:
        for span in read.spans:
            wanted = span.wanted
            row, end = target[wanted.batch, span.layer], wanted.place + wanted.stop - wanted.start
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
