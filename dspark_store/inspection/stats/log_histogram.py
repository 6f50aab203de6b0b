"""A histogram of positive numbers over fixed bins of equal ratio, and quantiles from it."""

from __future__ import annotations

import numpy as np

PER_OCTAVE = 16
_LOWEST, _HIGHEST = -32, 136
BINS = (_HIGHEST - _LOWEST) * PER_OCTAVE + 2
"""Sixteen bins an octave from 2^-32 to 2^136, which is beyond any norm of finite states, and one at each end."""
_SIXTEENTHS = 2.0 ** (np.arange(1, PER_OCTAVE) / PER_OCTAVE - 1)


def count_bins(values: np.ndarray) -> np.ndarray:
    """Return (BINS,) int64: how many of some finite numbers >= 0 fall into each bin.

    The bins are found by comparison and not by a logarithm, whose last bit is not the same on all machines.
    """
    mantissa, exponent = np.frexp(values)
    bins = (exponent.astype(np.int64) - 1 - _LOWEST) * PER_OCTAVE + np.searchsorted(_SIXTEENTHS, mantissa, "right") + 1
    bins[values == 0] = 0
    return np.bincount(np.clip(bins, 0, BINS - 1), minlength=BINS)


def quantile(counts: np.ndarray, share: float, low: float, high: float) -> float:
    """Return a quantile of the numbers that were counted, between their ends ``low`` and ``high``.

    It is interpolated in its bin, so it is off by at most the bin's width, 4.4 %. ValueError without numbers.
    """
    total = int(counts.sum())
    if not total:
        raise ValueError("no number was counted, so there is no quantile")
    rank = share * (total - 1)
    reached = np.cumsum(counts)
    found = int(np.searchsorted(reached, rank, "right"))
    if found == 0:
        return low
    inside = (rank - (int(reached[found]) - int(counts[found])) + 0.5) / int(counts[found])
    value = 2.0 ** (_LOWEST + (found - 1 + inside) / PER_OCTAVE)
    return float(min(max(value, low), high))
