"""What is kept of the states of one layer: sums, ends and counts, which merge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from dspark_store.format.dtypes import CacheDtype, tensor_bits
from dspark_store.inspection.stats.log_histogram import BINS, count_bins
from dspark_store.inspection.stats.moments import Moments, moments_of

_MANTISSA_BITS = {"bf16": 7, "fp16": 10, "fp32": 23}


@dataclass(frozen=True, slots=True)
class StateTally:
    """Of the tokens of a layer whose H values are all finite: what their means and spreads follow from.

    ``channel_sum`` and ``channel_square`` (H,) are float64 sums, ``channel_low`` and ``channel_high`` (H,) the ends;
    ``norms`` are of the tokens' Euclidean norms, ``norm_bins`` their histogram, ``first`` those of samples' first
    tokens. Counted over all tokens: ``exponents`` (2^bits,) the values by their stored exponent, whose last entry is
    of values that are not finite, ``zeros``, and ``nonfinite_tokens`` those with such a value.
    """

    channel_sum: np.ndarray
    channel_square: np.ndarray
    channel_low: np.ndarray
    channel_high: np.ndarray
    norms: Moments
    norm_bins: np.ndarray
    first: Moments
    exponents: np.ndarray
    zeros: int
    nonfinite_tokens: int

    def merge(self, later: StateTally) -> StateTally:
        """Return the tally of both."""
        return StateTally(
            self.channel_sum + later.channel_sum,
            self.channel_square + later.channel_square,
            np.minimum(self.channel_low, later.channel_low),
            np.maximum(self.channel_high, later.channel_high),
            self.norms.merge(later.norms),
            self.norm_bins + later.norm_bins,
            self.first.merge(later.first),
            self.exponents + later.exponents,
            self.zeros + later.zeros,
            self.nonfinite_tokens + later.nonfinite_tokens,
        )


def empty_tally(width: int, dtype: CacheDtype) -> StateTally:
    """Return the tally of no tokens of ``width`` features."""
    zeros = np.zeros(width)
    return StateTally(
        zeros,
        zeros,
        np.full(width, np.inf),
        np.full(width, -np.inf),
        Moments(),
        np.zeros(BINS, np.int64),
        Moments(),
        np.zeros(exponent_count(dtype), np.int64),
        0,
        0,
    )


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
        values.sum(axis=0),
        squares.sum(axis=0),
        kept.min(axis=0, initial=np.inf),
        kept.max(axis=0, initial=-np.inf),
        moments_of(kept_norms),
        count_bins(kept_norms),
        moments_of(norms[:1][finite[:1]]) if starts_sample else Moments(),
        exponents,
        zeros,
        int(len(finite) - finite.sum()),
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


def cosines(lower: TallyBlock, upper: TallyBlock) -> Moments:
    """Return the cosines between the states of the same tokens in two layers.

    A token is left out where a state is zero or has a value that is not finite.
    """
    lengths = lower.norms * upper.norms
    defined = lower.finite & upper.finite & (lengths > 0)
    products = (lower.values * upper.values).sum(axis=1)[defined]
    return moments_of(np.clip(products / lengths[defined], -1.0, 1.0))
