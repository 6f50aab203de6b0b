"""What each batch of an epoch holds: padded rows of one sample, or packed rows of several. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from dspark_store.readers.order import BatchPlan
from dspark_store.readers.packing import PackPlan, packed_fields, stack_fields
from dspark_store.readers.plan import SampleSpan, padded_spans


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One batch to read: ``rows`` rows of ``length`` positions, the spans that fill them, and fields to go with it."""

    rows: int
    length: int
    spans: tuple[SampleSpan, ...]
    fields: Mapping[str, np.ndarray] = field(default_factory=dict)


class Epoch(Protocol):
    """One epoch's batches."""

    @property
    def batches(self) -> BatchPlan:
        """How the epoch falls into batches."""
        ...

    def samples(self, step: int, dp_rank: int) -> np.ndarray:
        """Return the samples of a rank's batch at a step, int64; IndexError when there is none."""
        ...

    def request(self, step: int, dp_rank: int) -> BatchRequest:
        """Return a rank's batch at a step; IndexError when there is none."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PaddedEpoch:
    """Rows of one sample. ``order`` is the epoch's, ``lengths`` (N,) of all samples.

    Rows have the positions [start, stop); with ``longest`` they end where the batch's longest sample does. ``index``
    adds the fields ``sample`` and ``length``, (rows,) int64.
    """

    order: np.ndarray
    lengths: np.ndarray
    batches: BatchPlan
    start: int
    stop: int
    longest: bool
    index: bool

    def samples(self, step: int, dp_rank: int) -> np.ndarray:
        """See `Epoch`."""
        samples: np.ndarray = self.order[self.batches.positions(step, dp_rank)]
        return samples

    def request(self, step: int, dp_rank: int) -> BatchRequest:
        """See `Epoch`."""
        samples = self.samples(step, dp_rank)
        sizes = self.lengths[samples]
        stop = self.stop
        if self.longest:
            stop = max(self.start, min(stop, int(sizes.max(initial=0))))
        spans = padded_spans(samples.tolist(), sizes.tolist(), self.start, stop)
        fields = {"sample": samples.astype(np.int64), "length": sizes.astype(np.int64)} if self.index else {}
        return BatchRequest(len(spans), stop - self.start, tuple(spans), fields)


@dataclass(frozen=True, slots=True, eq=False)
class PackedEpoch:
    """Rows of a token budget with several samples; see `PackPlan` and `PackedFields`."""

    plan: PackPlan

    @property
    def batches(self) -> BatchPlan:
        """See `Epoch`."""
        return self.plan.batches

    def samples(self, step: int, dp_rank: int) -> np.ndarray:
        """See `Epoch`."""
        rows = self.plan.rows_of(step, dp_rank).tolist()
        return np.concatenate([np.empty(0, np.int64), *(self.plan.row(row)[0] for row in rows)])

    def request(self, step: int, dp_rank: int) -> BatchRequest:
        """See `Epoch`."""
        rows = self.plan.rows_of(step, dp_rank)
        spans: list[SampleSpan] = []
        described = []
        for batch, row in enumerate(rows.tolist()):
            samples, kept = self.plan.row(row)
            ends = np.cumsum(kept).tolist()
            for sample, size, end in zip(samples.tolist(), kept.tolist(), ends, strict=True):
                room = self.plan.budget if end == ends[-1] else end
                spans.append(SampleSpan(sample, 0, size, batch, end - size, room))
            described.append(packed_fields(kept, self.plan.budget))
        if not described:
            return BatchRequest(0, self.plan.budget, ())
        fields = stack_fields(described)
        names = ("position_ids", "doc_remaining", "attention_mask", "seq_lens", "cu_seqlens")
        return BatchRequest(len(rows), self.plan.budget, tuple(spans), {name: getattr(fields, name) for name in names})
