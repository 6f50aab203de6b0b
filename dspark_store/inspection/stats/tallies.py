"""What is kept of the tokens and states of some samples: sums, ends and counts, which merge."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from dspark_store.format.dtypes import CacheDtype, tensor_bits

PER_OCTAVE = 16
_LOWEST, _HIGHEST = -32, 136
BINS = (_HIGHEST - _LOWEST) * PER_OCTAVE + 2
"""Sixteen bins an octave from 2^-32 to 2^136, which is beyond any norm of finite states, and one at each end."""
_SIXTEENTHS = 2.0 ** (np.arange(1, PER_OCTAVE) / PER_OCTAVE - 1)
_MOST_IDS = 1 << 20
"""No vocabulary is as large: neither a manifest nor one damaged id makes more counts."""
_MANTISSA_BITS = {"bf16": 7, "fp16": 10, "fp32": 23}


@dataclass(frozen=True, slots=True)
class Tally:
    """What is kept of some samples. Two of them merge field by field: counts are added, tallies in them merge."""

    def merge(self, later: Self) -> Self:
        """Return the tally of both."""
        return type(self)(*(_merged(getattr(self, field.name), getattr(later, field.name)) for field in fields(self)))


def _merged(one: Any, later: Any) -> Any:  # noqa: ANN401 - whatever the fields of tallies are
    if one is None or later is None:
        return later if one is None else one
    if isinstance(one, tuple):
        return tuple(_merged(*parts) for parts in zip(one, later, strict=True))
    return one.merge(later) if isinstance(one, Tally) else one + later


@dataclass(frozen=True, slots=True)
class Moments[Number: (float, np.ndarray)](Tally):
    """What is kept of ``count`` numbers, or of vectors feature by feature: sum, sum of squares, least and greatest.

    Sums are float64. Without numbers ``low`` is infinite, ``high`` minus infinite, and there is no mean.
    """

    count: int
    total: Number
    square: Number
    low: Number
    high: Number

    def merge(self, later: Self) -> Self:
        """Return the moments of both."""
        low, high = np.minimum(self.low, later.low), np.maximum(self.high, later.high)
        return type(self)(self.count + later.count, self.total + later.total, self.square + later.square, low, high)

    @property
    def mean(self) -> Number | None:
        """The mean, None without numbers."""
        return self.total / self.count if self.count else None

    @property
    def std(self) -> Number | None:
        """The standard deviation of these very numbers, not an estimate of a larger set's; None without numbers."""
        mean = self.mean
        return None if mean is None else np.sqrt(np.maximum(0.0, self.square / self.count - mean * mean))


NO_NUMBERS = Moments(0, 0.0, 0.0, math.inf, -math.inf)


def moments_of(values: np.ndarray) -> Moments[float]:
    """Return the moments of finite float64 numbers."""
    if not values.size:
        return NO_NUMBERS
    square = float((values * values).sum())
    return Moments(values.size, float(values.sum()), square, float(values.min()), float(values.max()))


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


@dataclass(frozen=True, slots=True)
class TokenTally(Tally):
    """``counts`` and ``supervised`` (V,) int64 by id, of all tokens and of the supervised ones.

    ``outside`` counts tokens whose id is not in the vocabulary.
    """

    counts: np.ndarray
    supervised: np.ndarray
    outside: int


def tally_tokens(ids: np.ndarray, mask: np.ndarray, vocabulary: int | None) -> TokenTally:
    """Count some ids and their mask, both (tokens,).

    ``vocabulary`` is how many ids the target knows, None where no manifest says so. Ids past the first 1 Mi are counted
    as outside.
    """
    size = min(vocabulary or _MOST_IDS, _MOST_IDS)
    known = (ids >= 0) & (ids < size)
    kept = ids[known]
    counts, supervised = np.bincount(kept, minlength=size), np.bincount(ids[known & (mask == 1)], minlength=size)
    return TokenTally(counts, supervised, len(ids) - len(kept))


@dataclass(frozen=True, slots=True)
class StateTally(Tally):
    """Of the tokens of a layer whose H values are all finite: what their means and spreads follow from.

    ``channels`` are the moments of their states, (H,) each; ``norms`` those of the tokens' Euclidean norms,
    ``norm_bins`` their histogram, ``first`` those of samples' first tokens. Counted over all tokens: ``exponents``
    (2^bits,) the values by their stored exponent, whose last entry is of values that are not finite, ``zeros``, and
    ``nonfinite_tokens`` those with such a value.
    """

    channels: Moments[np.ndarray]
    norms: Moments[float]
    norm_bins: np.ndarray
    first: Moments[float]
    exponents: np.ndarray
    zeros: int
    nonfinite_tokens: int


def empty_tally(width: int, dtype: CacheDtype) -> StateTally:
    """Return the tally of no tokens of ``width`` features."""
    zeros = np.zeros(width)
    channels = Moments(0, zeros, zeros, np.full(width, np.inf), np.full(width, -np.inf))
    exponents = np.zeros(exponent_count(dtype), np.int64)
    return StateTally(channels, NO_NUMBERS, np.zeros(BINS, np.int64), NO_NUMBERS, exponents, 0, 0)


def exponent_count(dtype: CacheDtype) -> int:
    """Return how many exponents a dtype can store: 32 for fp16, 256 for the others."""
    return 1 << (8 * dtype.itemsize - 1 - _MANTISSA_BITS[dtype.name])


class TallyBlock(NamedTuple):
    """Some tokens of a layer, counted: the tally, and (tokens, H) values, norms and finiteness for the next layer."""

    tally: StateTally
    values: np.ndarray
    norms: np.ndarray
    finite: np.ndarray


def tally_block(states: torch.Tensor, dtype: CacheDtype, *, starts_sample: bool) -> TallyBlock:
    """Count some neighbouring tokens of a sample, (tokens, H) in the cache dtype, in float64.

    ``starts_sample`` says that the first of them is the sample's first token.
    """
    bits = tensor_bits(states)
    exponents, zeros = _count_exponents(bits, dtype)
    values = states.double().numpy()
    finite = np.ones(len(values), bool)
    if exponents[-1]:
        finite = np.isfinite(values).all(axis=1)
        values[~finite] = 0
    squares = values * values
    norms = np.sqrt(squares.sum(axis=1))
    kept = values if finite.all() else values[finite]
    kept_norms = norms[finite]
    tally = StateTally(
        Moments(
            len(kept),
            values.sum(axis=0),
            squares.sum(axis=0),
            kept.min(axis=0, initial=np.inf),
            kept.max(axis=0, initial=-np.inf),
        ),
        moments_of(kept_norms),
        count_bins(kept_norms),
        moments_of(norms[:1][finite[:1]]) if starts_sample else NO_NUMBERS,
        exponents,
        zeros,
        len(finite) - len(kept),
    )
    return TallyBlock(tally, values, norms, finite)


def _count_exponents(bits: np.ndarray, dtype: CacheDtype) -> tuple[np.ndarray, int]:
    """Return how many values have each stored exponent, and how many are zero."""
    sign, mantissa = 8 * dtype.itemsize - 1, _MANTISSA_BITS[dtype.name]
    fields = (bits << bits.dtype.type(1)) >> bits.dtype.type(mantissa + 1)
    stored = torch.from_numpy(fields.astype(np.uint8).ravel())  # torch counts bytes twice as fast as numpy
    counts = torch.bincount(stored, minlength=exponent_count(dtype)).numpy()
    zeros = int(np.count_nonzero((bits & bits.dtype.type((1 << sign) - 1)) == 0)) if counts[0] else 0
    return counts, zeros


def cosines(lower: TallyBlock, upper: TallyBlock) -> Moments[float]:
    """Return the cosines between the states of the same tokens in two layers.

    A token is left out where a state is zero or has a value that is not finite.
    """
    lengths = lower.norms * upper.norms
    defined = lower.finite & upper.finite & (lengths > 0)
    products = (lower.values * upper.values).sum(axis=1)[defined]
    return moments_of(np.clip(products / lengths[defined], -1.0, 1.0))
