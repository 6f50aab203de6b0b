"""Ids and masks of a batch: read by whole rows, or kept whole while they are small, and put into their places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch

from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.schema import IDS, StoreSchema
from dspark_store.format.token_shards import TOKEN_VALUES
from dspark_store.readers.index import StoreIndex
from dspark_store.readers.plan import SampleSpan, padded_spans
from dspark_store.readers.threads import Pending

KEPT_TOKEN_BYTES = 64 * 1024 * 1024
"""Token columns up to this size are read whole when a loader starts: they would be a third of all requests."""
_SHARDS_AT_ONCE = 8

type RowReads = Callable[[Sequence[SampleSpan], Mapping[str, np.ndarray]], Pending[None]]
"""Begins to fill rows, (spans, 1, S) by column, with the tokens of whole samples."""


class TokenColumns:
    """The token columns of a store, as far as they are kept, and what puts tokens into a batch."""

    def __init__(self, schema: StoreSchema, index: StoreIndex, pad_token_id: int) -> None:
        self._schema, self._index, self._pad_token_id = schema, index, pad_token_id
        self._kept: Mapping[str, np.ndarray] = {}

    def keep(self, columns: Sequence[str], start: RowReads) -> None:
        """Read these columns whole if they take at most ``KEPT_TOKEN_BYTES``, and keep them until `drop`.

        Where one cannot be read whole, none is kept: its damage is an error of the batch that needs it.
        """
        wanted = {column: dtype for column, (dtype, _) in TOKEN_VALUES.items() if column in columns}
        total = int(self._starts[-1])
        token_bytes = sum(np.dtype(dtype).itemsize for dtype in wanted.values())
        if wanted.keys() <= self._kept.keys() or total * token_bytes > KEPT_TOKEN_BYTES:
            return
        kept = {column: np.empty(total, dtype) for column, dtype in wanted.items()}
        shards = range(self._schema.tokens.num_shards)
        for first in shards[::_SHARDS_AT_ONCE]:
            begun = []
            for shard in shards[first : first + _SHARDS_AT_ONCE]:
                spans = self.whole(self._schema.tokens.rows(shard))
                rows = self._empty(wanted, spans)
                begun.append((start(spans, rows), spans, rows))
            for pending, _, _ in begun:
                pending.wait()
            try:
                for pending, _, _ in begun:
                    pending.result()
            except (DamagedStoreError, OSError):
                return
            for _, spans, rows in begun:
                for column, values in kept.items():
                    for span, row in zip(spans, rows[column][:, 0], strict=True):
                        values[self._place_of(span.sample)] = row[: span.stop]
        self._kept = kept

    def drop(self) -> None:
        """Let go of what is kept."""
        self._kept = {}

    def whole(self, samples: Sequence[int]) -> list[SampleSpan]:
        """Return the spans of whole samples, a row each: a row is one chunk."""
        return padded_spans(samples, self._index.length[list(samples)].tolist(), 0, self._schema.seq_length)

    def begin(
        self, spans: Sequence[SampleSpan], batch: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, np.ndarray], Callable[[], None]]:
        """Return the rows to read for a batch's token columns, as `RowReads` has them, and what then fills the batch.

        Rows of columns that are kept need not be read. Where no span lands, ids are the pad token id and masks 0.
        """
        kept = self._kept
        rows = self._empty((batch.keys() & TOKEN_VALUES.keys()) - kept.keys(), spans)

        def place() -> None:
            for column in batch.keys() & TOKEN_VALUES.keys():
                target = batch[column].numpy()
                target[...] = self._pad_token_id if column == IDS else 0
                for number, span in enumerate(spans):
                    values = rows[column][number, 0] if column in rows else kept[column][self._place_of(span.sample)]
                    into = slice(span.place, span.place + span.stop - span.start)
                    target[span.batch, into] = values[span.start : span.stop]

        return rows, place

    def _empty(self, columns: Iterable[str], spans: Sequence[SampleSpan]) -> dict[str, np.ndarray]:
        shape = (len(spans), 1, self._schema.seq_length)
        return {column: np.zeros(shape, TOKEN_VALUES[column][0]) for column in columns}

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self._index.length, dtype=np.int64)])

    def _place_of(self, sample: int) -> slice:
        return slice(*self._starts[sample : sample + 2].tolist())
