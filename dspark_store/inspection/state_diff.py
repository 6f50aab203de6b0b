"""Which samples two stores have in common, and how far their states lie apart, shard by shard of the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from dspark_store.format.schema import LAST, LAYERS
from dspark_store.inspection.shardwise import Workers
from dspark_store.progress import start_progress
from dspark_store.readers.cache import Cache

_KEY = np.dtype([("first", "<u8"), ("second", "<u8"), ("rank", "<i8")])
_EQUAL = -1.0
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

    def kept(self, wanted: np.ndarray | slice) -> Matching:
        """Return the matching with some of its pairs: ``wanted`` is a mask, places or a slice."""
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


class WorstSample(NamedTuple):
    """The sample whose states lie furthest apart, by its number in each store."""

    difference: float
    a: int
    b: int


@dataclass(frozen=True, slots=True)
class StateDifference:
    """How far the states of pairs of samples lie apart, which are number ``a`` and ``b`` in their stores, (pairs,).

    ``values`` (pairs, layers + 1) float64 has the `difference` by layer, and then of the last hidden states; it is
    below 0 where every bit is the same or, where the dtypes differ, every value as float32.
    """

    a: np.ndarray
    b: np.ndarray
    layers: Sequence[int]
    values: np.ndarray

    @property
    def compared(self) -> int:
        """How many samples were compared."""
        return len(self.values)

    @property
    def equal(self) -> int:
        """How many of them are the same in all layers."""
        return int((self.values < 0).all(axis=1).sum())

    @property
    def by_layer(self) -> dict[StateName, tuple[float, int]]:
        """The largest difference and the number of samples that differ, by layer; empty where none was compared."""
        if not self.compared:
            return {}
        largest, unequal = self.values.max(axis=0).clip(0).tolist(), (self.values >= 0).sum(axis=0).tolist()
        return dict(zip((*self.layers, None), zip(largest, unequal, strict=True), strict=True))

    @property
    def worst(self) -> WorstSample | None:
        """The sample with the largest difference, of several the one with the lowest number."""
        if self.equal == self.compared:
            return None
        largest = self.values.max(axis=1)
        place = int(np.lexsort((np.maximum(self.a, self.b), np.minimum(self.a, self.b), -largest))[0])
        return WorstSample(float(largest[place]), int(self.a[place]), int(self.b[place]))


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
    ordered, values = pairs.kept(order), np.full((len(pairs), len(layers) + 1), _EQUAL)
    position = (len(layers) + 1) * a.schema.hidden_size * max(a.dtype.itemsize, b.dtype.itemsize)

    def compare(shard: int) -> None:
        first, stop = bounds[shard]
        longest = max(1, int(a.lengths[ordered.a[first:stop]].max()))
        step = max(1, _READ_BYTES // (longest * position))
        for begin in range(first, stop, step):
            some = slice(begin, min(begin + step, stop))
            values[some] = _apart(a, b, ordered.kept(some), layers)

    with start_progress("compare", len(pairs), "samples") as progress:
        for shard, _ in Workers(threads).each(compare, list(bounds)):
            progress.advance(bounds[shard][1] - bounds[shard][0])
    return StateDifference(ordered.a, ordered.b, layers, values)


def _apart(a: Cache, b: Cache, pairs: Matching, layers: Sequence[int]) -> list[list[float]]:
    """Return by pair and layer how far the states of some pairs lie apart."""
    lengths = a.lengths[pairs.a].tolist()
    stores = ((a, pairs.a.tolist()), (b, pairs.b.tolist()))
    both = list(zip(*(_read(cache, rows, layers, slice(0, max(lengths))) for cache, rows in stores), strict=True))
    found = (
        [difference(one[at, :length], other[at, :length]) for one, other in both] for at, length in enumerate(lengths)
    )
    return [[_EQUAL if largest is None else largest for largest in row] for row in found]


def _read(cache: Cache, samples: Sequence[int], layers: Sequence[int], span: slice) -> list[torch.Tensor]:
    """Return the states of some samples, (B, positions, H), by layer, and then the last hidden states."""
    columns = (LAYERS, LAST) if layers else (LAST,)
    batch = cache.read(samples, columns=columns, layers=layers, positions=span, layout="stacked")
    return [*(batch[LAYERS].unbind(1) if layers else ()), batch[LAST]]


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
