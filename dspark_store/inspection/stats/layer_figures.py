"""The figures of one layer, from its tally."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.inspection.stats.tallies import Moments, StateTally, quantile

type Summary = Mapping[str, JsonValue]

QUANTILES = {"p1": 0.01, "p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}
OUTLIERS_NAMED = 16
_PROFILE_POINTS = 48


def summarise_layer(tally: StateTally, outlier_factor: float) -> Summary:
    """Return the figures of a layer as JSON; docs/commands/stats.md says what each is.

    A channel is an outlier when its greatest magnitude or its standard deviation is more than ``outlier_factor``
    times that of the median channel.
    """
    tokens = tally.norms.count
    return {
        "tokens": tokens,
        "nonfinite": {"values": int(tally.exponents[-1]), "tokens": tally.nonfinite_tokens},
        "zeros": {"values": tally.zeros, "share": _share(tally.zeros, int(tally.exponents.sum()))},
        "norm": {
            **spread(tally.norms),
            "quantiles": _norm_quantiles(tally),
            "first_token_mean": tally.first.mean,
        },
        "exponents": _exponents(tally.exponents),
        "channels": _channels(tally, tokens, outlier_factor),
    }


def spread(moments: Moments) -> Summary:
    """Return mean, standard deviation, least and greatest, null where there are no numbers."""
    some = moments.count > 0
    return {
        "mean": moments.mean,
        "std": moments.std,
        "min": moments.low if some else None,
        "max": moments.high if some else None,
    }


def rank_points(count: int, points: int) -> np.ndarray:
    """Return at most ``points`` ranks from 1 to ``count``, ascending int64, evenly spread on a logarithmic axis."""
    if count < 1:
        return np.zeros(0, np.int64)
    return np.unique(np.geomspace(1, count, points).round().astype(np.int64))


def _norm_quantiles(tally: StateTally) -> Summary:
    if not tally.norms.count:
        return dict.fromkeys(QUANTILES)
    ends = tally.norms.low, tally.norms.high
    return {name: quantile(tally.norm_bins, share, *ends) for name, share in QUANTILES.items()}


def _exponents(counts: np.ndarray) -> Summary:
    """Return the powers of two that normal values lie between, values by power, and the ends of the dtype."""
    normal = np.flatnonzero(counts[1:-1])
    bias = len(counts) // 2 - 1
    first, last = (int(normal[0]) + 1, int(normal[-1]) + 1) if normal.size else (1, 0)
    return {
        "min": first - bias if normal.size else None,
        "max": last - bias if normal.size else None,
        "least_of_dtype": 1 - bias,
        "greatest_of_dtype": len(counts) - 2 - bias,
        "counts": counts[first : last + 1].tolist(),
    }


def _channels(tally: StateTally, tokens: int, outlier_factor: float) -> Summary:
    width = len(tally.channel_sum)
    count = max(1, tokens)
    mean = tally.channel_sum / count
    std = np.sqrt(np.maximum(0.0, tally.channel_square / count - mean * mean))
    greatest = np.zeros(width)
    if tokens:
        greatest = np.maximum(np.abs(tally.channel_low), np.abs(tally.channel_high))
    energy = np.sort(tally.channel_square)[::-1]
    ranks = rank_points(width, _PROFILE_POINTS)
    return {
        "count": width,
        "constant": int((tally.channel_low == tally.channel_high).sum()),
        "energy_share": {
            "top_1": _energy(energy, 1),
            "top_10": _energy(energy, min(10, width)),
            "top_1_percent": _energy(energy, math.ceil(width / 100)),
        },
        "rms_by_rank": {"rank": ranks.tolist(), "rms": np.sqrt(energy[ranks - 1] / count).tolist()},
        "outliers": _outliers(std, greatest, outlier_factor),
        "mean": mean.tolist(),
        "std": std.tolist(),
        "absolute_max": greatest.tolist(),
    }


def _outliers(std: np.ndarray, greatest: np.ndarray, factor: float) -> Summary:
    """Return how many channels stand out, and the strongest of them, by their times of the median channel."""
    times = [_times_of_median(values) for values in (greatest, std)]
    found = np.flatnonzero((times[0] > factor) | (times[1] > factor))
    strongest = found[np.argsort(-np.maximum(*times)[found], kind="stable")][:OUTLIERS_NAMED]
    return {
        "count": len(found),
        "factor": factor,
        "median_absolute_max": float(np.median(greatest)),
        "median_std": float(np.median(std)),
        "strongest": [
            {
                "channel": int(channel),
                "absolute_max": float(greatest[channel]),
                "absolute_max_times": float(times[0][channel]),
                "std": float(std[channel]),
                "std_times": float(times[1][channel]),
            }
            for channel in strongest
        ],
    }


def _times_of_median(values: np.ndarray) -> np.ndarray:
    """Return values as multiples of their median, zeros where that is zero and so no measure of anything."""
    median = float(np.median(values))
    return values / median if median > 0 else np.zeros_like(values)


def _energy(descending: np.ndarray, channels: int) -> float | None:
    total = float(descending.sum())
    return float(descending[:channels].sum()) / total if total else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
