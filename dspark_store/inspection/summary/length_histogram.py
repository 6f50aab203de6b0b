"""How long the samples of a store are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_MOST_BINS = 10


@dataclass(frozen=True, slots=True)
class LengthBin:
    """Samples of ``first`` to ``last`` tokens, both included."""

    first: int
    last: int
    samples: int


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """Lengths in tokens. ``at_limit`` samples are as long as the store allows; some may be cut."""

    shortest: int
    mean: float
    median: int
    longest: int
    at_limit: int
    histogram: tuple[LengthBin, ...]


def summarise_lengths(lengths: np.ndarray, limit: int) -> LengthSummary | None:
    """Describe the lengths of some samples, (n,) of 0 to ``limit`` tokens; None when there are none."""
    if not len(lengths):
        return None
    return LengthSummary(
        shortest=int(lengths.min()),
        mean=float(lengths.mean()),
        median=int(np.percentile(lengths, 50, method="lower")),
        longest=int(lengths.max()),
        at_limit=int((lengths == limit).sum()),
        histogram=length_bins(lengths),
    )


def length_bins(lengths: np.ndarray) -> tuple[LengthBin, ...]:
    """Count lengths in at most ten bins of one round width, from 0 to the longest; every length is in one."""
    longest = int(lengths.max(initial=0))
    width = next(width for width in _round_numbers() if longest // width < _MOST_BINS)
    counts = np.bincount(lengths // width, minlength=longest // width + 1).tolist()
    return tuple(
        LengthBin(number * width, min(longest, (number + 1) * width - 1), count) for number, count in enumerate(counts)
    )


def _round_numbers() -> Iterator[int]:
    power = 1
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10
