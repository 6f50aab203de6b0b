"""Which samples two stores have in common, by the digests of their tokens. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_KEY = np.dtype([("first", "<u8"), ("second", "<u8"), ("rank", "<i8")])


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
