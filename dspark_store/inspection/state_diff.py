"""Which samples two stores have in common, and how far their states lie apart, shard by shard of the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from dspark_store.format.schema import LAST, LAYERS
from dspark_store.inspection.shardwise import Workers
from dspark_store.progress import start_progress
from dspark_store.readers.cache import Cache

_KEY = np.dtype([("first", "<u8"), ("second", "<u8"), ("rank", "<i8")])
_READ_BYTES = 32 * 1024 * 1024

type StateName = int | None
"""A captured layer by its id, or None for the last hidden states."""


@dataclass(frozen=True, slots=True)
class Matching:
    """Pairs of samples with the same tokens: ``a`` and ``b`` are their numbers, (pairs,) int64, by rising digest.

    ``only_a`` and ``only_b`` are the samples that the other store lacks, or has fewer times; rising.
    """

    a: np.ndarray
    b: np.ndarray
    only_a: np.ndarray
    only_b: np.ndarray

    def __len__(self) -> int:
        return len(self.a)

    @property
    def moved(self) -> int:
        """How many of the pairs have different numbers."""
        return int((self.a != self.b).sum())

    def kept(self, wanted: np.ndarray) -> Matching:
        """Return the matching with some of its pairs: ``wanted`` is a mask, or places."""
        return Matching(self.a[wanted], self.b[wanted], self.only_a, self.only_b)


def match_samples(a: np.ndarray, b: np.ndarray) -> Matching:
    """Match two stores' samples by digest, (N, 2) uint64 each; each sample is in one pair at most.

    Samples of one digest stand for one another. Those of the same number are paired first, the rest in their order.
    """
    both = min(len(a), len(b))
    same = np.flatnonzero((a[:both] == b[:both]).all(axis=1))
    rest_a, rest_b = (np.delete(np.arange(len(digests)), same) for digests in (a, b))
    _, place_a, place_b = np.intersect1d(_keys(a[rest_a]), _keys(b[rest_b]), assume_unique=True, return_indices=True)
    pairs_a = np.concatenate([same, rest_a[place_a]])
    pairs_b = np.concatenate([same, rest_b[place_b]])
    order = np.lexsort((np.minimum(pairs_a, pairs_b), a[pairs_a, 1], a[pairs_a, 0]))
    return Matching(pairs_a[order], pairs_b[order], np.delete(rest_a, place_a), np.delete(rest_b, place_b))


def _keys(digests: np.ndarray) -> np.ndarray:
    """Return what no two samples of a store share: the digest, and how many samples of it came before."""
    keys = np.zeros(len(digests), _KEY)
    keys["first"], keys["second"] = digests[:, 0], digests[:, 1]
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    ordered = digests[order]
    begins = np.ones(len(digests), bool)
    begins[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    places = np.arange(len(digests))
    keys["rank"][order] = places - np.maximum.accumulate(np.where(begins, places, 0))
    return keys


@dataclass(frozen=True, slots=True)
class WorstSample:
    """The sample whose states lie furthest apart, by its number in each store."""

    difference: float
    a: int
    b: int


@dataclass(slots=True)
class StateDifference:
    """What a comparison has found: ``largest`` absolute difference by layer, ``compared`` samples, ``equal`` of them.

    A value that is not finite in one store only differs by infinity. ``equal`` counts samples of which every bit is the
    same or, where the dtypes differ, every value as float32; ``unequal`` those others, by layer.
    """

    largest: dict[StateName, float] = field(default_factory=dict)
    unequal: dict[StateName, int] = field(default_factory=dict)
    compared: int = 0
    equal: int = 0
    worst: WorstSample | None = None

    def add(self, other: StateDifference) -> None:
        """Add what was found in another shard."""
        for name, difference in other.largest.items():
            self.largest[name] = max(self.largest.get(name, 0.0), difference)
            self.unequal[name] = self.unequal.get(name, 0) + other.unequal[name]
        self.compared += other.compared
        self.equal += other.equal
        self._note(other.worst)

    def count(self, differences: Mapping[StateName, float | None], a: int, b: int) -> None:
        """Count one sample: the difference by layer, None where its bits are the same."""
        for name, difference in differences.items():
            self.largest[name] = max(self.largest.get(name, 0.0), difference or 0.0)
            self.unequal[name] = self.unequal.get(name, 0) + (difference is not None)
        found = [difference for difference in differences.values() if difference is not None]
        self.compared += 1
        self.equal += not found
        if found:
            self._note(WorstSample(max(found), a, b))

    def _note(self, other: WorstSample | None) -> None:
        if other is not None and (self.worst is None or _rank(other) > _rank(self.worst)):
            self.worst = other


def _rank(sample: WorstSample) -> tuple[float, int, int]:
    """Order samples in a way that knows no first and second store, and takes early ones before late ones."""
    return sample.difference, -min(sample.a, sample.b), -max(sample.a, sample.b)


def compare_states(
    a: Cache, b: Cache, pairs: Matching, layers: Sequence[int], *, threads: int | None = None
) -> StateDifference:
    """Compare the states of pairs of samples, both of which must be captured, in some layers and the last states.

    A thread holds 32 MiB of each store's states, or one sample where that is more. DamagedStoreError or OSError where
    states cannot be read.
    """
    shard_of = pairs.a // a.schema.shard_size
    order = np.lexsort((pairs.b, shard_of))
    shards, starts = np.unique(shard_of[order], return_index=True)
    bounds = dict(zip(shards.tolist(), pairwise([*starts.tolist(), len(order)]), strict=True))
    found = StateDifference()
    task = partial(_compare_shard, a, b, pairs.kept(order), bounds, layers)
    with start_progress("compare", len(pairs), "samples") as progress:
        for _, difference in Workers(threads).each(task, list(bounds)):
            found.add(difference)
            progress.advance(difference.compared)
    return found


def _compare_shard(
    a: Cache, b: Cache, pairs: Matching, bounds: Mapping[int, tuple[int, int]], layers: Sequence[int], shard: int
) -> StateDifference:
    first, stop = bounds[shard]
    longest = max(1, int(a.lengths[pairs.a[first:stop]].max()))
    row_bytes = longest * (len(layers) + 1) * a.schema.hidden_size * max(a.dtype.itemsize, b.dtype.itemsize)
    step = max(1, _READ_BYTES // row_bytes)
    found = StateDifference()
    for begin in range(first, stop, step):
        end = min(begin + step, stop)
        samples_a, samples_b = pairs.a[begin:end].tolist(), pairs.b[begin:end].tolist()
        span = slice(0, int(a.lengths[samples_a].max()))
        states_a, states_b = (_read(cache, rows, layers, span) for cache, rows in ((a, samples_a), (b, samples_b)))
        for place, (sample_a, sample_b) in enumerate(zip(samples_a, samples_b, strict=True)):
            length = int(a.lengths[sample_a])
            differences = {
                name: difference(states_a[name][place, :length], states_b[name][place, :length]) for name in states_a
            }
            found.count(differences, sample_a, sample_b)
    return found


def _read(cache: Cache, samples: Sequence[int], layers: Sequence[int], span: slice) -> dict[StateName, torch.Tensor]:
    """Return the states of some samples, (B, positions, H), by layer."""
    columns = (LAYERS, LAST) if layers else (LAST,)
    batch = cache.read(samples, columns=columns, layers=layers, positions=span, layout="stacked")
    states: dict[StateName, torch.Tensor] = {layer: batch[LAYERS][:, place] for place, layer in enumerate(layers)}
    return {**states, None: batch[LAST]}


def difference(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """Return the largest absolute difference of two tensors of one shape, None when they are equal bit by bit.

    Different dtypes are compared as float32, and then equal when every value is. Infinity where a value is not finite
    in one of them only, or is another one.
    """
    if a.dtype != b.dtype:
        a, b = a.float(), b.float()
        if bool(((a == b) | (a.isnan() & b.isnan())).all()):
            return None
    elif torch.equal(_bits(a), _bits(b)):
        return None
    a, b = a.float(), b.float()
    apart = (a - b).abs()
    apart[(a == b) | (a.isnan() & b.isnan())] = 0.0
    return float(apart.nan_to_num(nan=torch.inf, posinf=torch.inf).max())


def _bits(states: torch.Tensor) -> torch.Tensor:
    return states.contiguous().view(torch.int16 if states.dtype.itemsize == 2 else torch.int32)
