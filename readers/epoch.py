"""Which samples of a store a loader gives, and what each batch of an epoch holds: padded rows, or packed ones."""

from __future__ import annotations

import difflib
import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from dspark_store.format.jsonvalue import json_digest
from dspark_store.readers.cache import Cache
from dspark_store.readers.order import (
    BatchPlan,
    EndRule,
    ShardWindow,
    admitted,
    check_word,
    epoch_order,
    split_mask,
)
from dspark_store.readers.packing import LongPolicy, PackPlan, check_packing, pack, packed_fields, stack_fields
from dspark_store.readers.plan import SampleSpan, padded_spans

type Shape = Literal["full", "longest", "packed"]
type Side = Literal["train", "validation"]

_log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class EpochPlanner:
    """How a loader's samples become the batches of its epochs. ValueError for options that make no sense.

    The fields are those of `CacheLoader`; ``span`` is the start and stop of a row's positions.
    """

    batch_size: int
    dp_size: int
    shuffle: bool
    seed: int
    shard_size: int
    window_shards: int | None
    last: EndRule
    shape: Shape
    budget: int | None
    long_samples: LongPolicy
    span: tuple[int, int]
    index_fields: bool

    def __post_init__(self) -> None:
        if self.shape not in ("full", "longest", "packed"):
            raise ValueError(f"the shape is {self.shape!r}; choose from full, longest, packed")
        if (self.shape == "packed") != (self.budget is not None):
            raise ValueError(
                f"a budget belongs to packed rows and only to them, got shape {self.shape!r}, budget {self.budget}"
            )
        check_packing(self.budget, self.long_samples)
        check_word("seed", self.seed)
        _ = self._window, self.batches(0)  # what they refuse, they refuse now

    @property
    def _window(self) -> ShardWindow | None:
        return None if self.window_shards is None else ShardWindow(self.shard_size, self.window_shards)

    @property
    def row_length(self) -> int:
        """Positions of a row, at most."""
        return self.span[1] - self.span[0] if self.budget is None else self.budget

    def batches(self, samples: int) -> BatchPlan:
        """Return how an epoch of rows of one sample falls into batches."""
        return BatchPlan(samples, self.batch_size, self.dp_size, self.last)

    def digest(self, samples: np.ndarray) -> str:
        """Return a digest of all that decides an epoch's rows beside the seed and the number of ranks."""
        order = [self.shuffle, self.window_shards, self.last, self.shape, self.budget, self.long_samples]
        return json_digest([*order, hashlib.blake2b(samples.tobytes()).hexdigest()], size=8)

    def plan(self, epoch: int, samples: np.ndarray, lengths: np.ndarray) -> PaddedEpoch | PackedEpoch:
        """Plan an epoch of some samples; ``lengths`` are those of the whole store."""
        order = epoch_order(samples, seed=self.seed, epoch=epoch, shuffle=self.shuffle, window=self._window)
        if self.budget is None:
            longest = self.shape == "longest"
            batches = self.batches(len(order))
            return PaddedEpoch(order, lengths, batches, *self.span, longest=longest, index=self.index_fields)
        plan = pack(
            order,
            lengths,
            budget=self.budget,
            rows_per_batch=self.batch_size,
            dp_size=self.dp_size,
            policy=self.long_samples,
            last=self.last,
        )
        return PackedEpoch(plan)


@dataclass(frozen=True, slots=True)
class Split:
    """One side of a split by content: about ``fraction`` of the samples are for validation; see `split_mask`."""

    side: Side
    fraction: float
    seed: int

    def __post_init__(self) -> None:
        if self.side not in ("train", "validation"):
            raise ValueError(f"the side of a split is {self.side!r}; choose from train, validation")

    def mask(self, cache: Cache) -> np.ndarray:
        """Return (N,) bool: whether each sample is on this side."""
        validation = split_mask(cache.index.digest, self.fraction, self.seed)
        return validation if self.side == "validation" else ~validation


def from_sources(cache: Cache, names: Sequence[str]) -> np.ndarray:
    """Return (N,) bool: whether each sample came from one of the named sources of its store.

    ValueError, with the nearest name, when the store has no source of a name; without names, none is chosen.
    """
    if isinstance(names, str):
        raise ValueError(f"sources are a list of names, got {names!r}; give [{names!r}]")
    for name in names:
        if name not in cache.sources:
            near = difflib.get_close_matches(str(name), cache.sources, 1, cutoff=0.0)
            known = f"the nearest is {near[0]!r}" if near else "it was not made from a blend"
            raise ValueError(f"the store has no source {name!r}; {known}")
    return np.isin(cache.source, [cache.sources.index(name) for name in names])


def choose_samples(
    cache: Cache, *, min_supervised: int, split: Split | None, sources: Sequence[str] | None = None
) -> np.ndarray:
    """Return the samples to load, (M,) int64 ascending, and log how many are left out for which reason.

    Left out are those with non-finite states and those of fewer than ``min_supervised`` supervised tokens; ``sources``
    restricts the choice to those of a blend's parts. ValueError when none is left.
    """
    among = None if split is None else split.mask(cache)
    if sources is not None:
        named = from_sources(cache, sources)
        among = named if among is None else among & named
    chosen = admitted(cache.supervised, cache.status, min_supervised=min_supervised, among=among)
    _log.info(
        "%d of %d samples; left out: %d with non-finite states, %d with fewer than %d supervised tokens",
        len(chosen.samples),
        len(cache),
        chosen.not_good,
        chosen.unsupervised,
        min_supervised,
    )
    if not len(chosen.samples):
        where = f"the {split.side} side of " if split is not None else ""
        where += f"sources {', '.join(sources)} in " if sources is not None else ""
        raise ValueError(
            f"no sample is left to load: of {where}{len(cache)} samples, {chosen.not_good} are not good and "
            f"{chosen.unsupervised} have fewer than {min_supervised} supervised tokens"
        )
    return chosen.samples
