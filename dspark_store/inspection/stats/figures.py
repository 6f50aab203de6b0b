"""The figures of a store's layers, lengths, sources and ids, as JSON, and how they are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.inspection.sample_survey import source_shares
from dspark_store.inspection.stats.tallies import Moments, StateTally, quantile
from dspark_store.readers.cache import Cache

type Summary = Mapping[str, JsonValue]
type Decode = Callable[[Sequence[int]], list[str]]
type Form = Literal["number", "percent", "power", "id", "token"]

QUANTILES = {"p1": 0.01, "p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}
OUTLIERS_NAMED = 16
COVERAGE_IDS = (100, 1000, 4000, 8000, 16000, 32000, 64000, 128000)
"""Sizes of a draft vocabulary of the most frequent ids that are looked at."""
NEEDED_SHARES = (0.5, 0.9, 0.95, 0.99, 0.999)
TOP_IDS = 30
_RANK_POINTS, _PROFILE_POINTS, _LENGTH_BINS = 64, 48, 32
_VISIBLE = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}


def summarise_layer(tally: StateTally, outlier_factor: float) -> Summary:
    """Return the figures of a layer as JSON; docs/commands/stats.md says what each is.

    A channel is an outlier when its greatest magnitude or its standard deviation is more than ``outlier_factor``
    times that of the median channel.
    """
    return {
        "tokens": tally.norms.count,
        "nonfinite": {"values": int(tally.exponents[-1]), "tokens": tally.nonfinite_tokens},
        "zeros": {"values": tally.zeros, "share": _share(tally.zeros, int(tally.exponents.sum()))},
        "norm": {
            **spread(tally.norms),
            "quantiles": _norm_quantiles(tally),
            "first_token_mean": tally.first.mean,
        },
        "exponents": _exponents(tally.exponents),
        "channels": _channels(tally, outlier_factor),
    }


def spread(moments: Moments[float]) -> Summary:
    """Return mean, standard deviation, least and greatest, null where there are no numbers."""
    some = moments.count > 0
    return {
        "mean": moments.mean,
        "std": moments.std,
        "min": moments.low if some else None,
        "max": moments.high if some else None,
    }


def _rank_points(count: int, points: int) -> np.ndarray:
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


def _channels(tally: StateTally, outlier_factor: float) -> Summary:
    channels = tally.channels
    width, tokens = len(channels.total), channels.count
    mean = std = greatest = np.zeros(width)
    if channels.mean is not None and channels.std is not None:
        mean, std = channels.mean, channels.std
        greatest = np.maximum(np.abs(channels.low), np.abs(channels.high))
    energy = np.sort(channels.square)[::-1]
    ranks = _rank_points(width, _PROFILE_POINTS)
    return {
        "count": width,
        "constant": int((channels.low == channels.high).sum()),
        "energy_share": {
            name: _share(float(energy[:count].sum()), float(energy.sum()))
            for name, count in (("top_1", 1), ("top_10", 10), ("top_1_percent", math.ceil(width / 100)))
        },
        "rms_by_rank": {"rank": ranks.tolist(), "rms": np.sqrt(energy[ranks - 1] / max(1, tokens)).tolist()},
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


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def summarise_lengths(cache: Cache) -> Summary:
    """Return the figures of all samples' lengths, in tokens, as JSON."""
    lengths, longest = cache.lengths, cache.schema.seq_length
    full = int((lengths == longest).sum())
    return {
        "samples": len(lengths),
        **_distribution(lengths),
        "full": full,
        "full_share": _share(full, len(lengths)),
        "histogram": _histogram(lengths, longest),
    }


def summarise_supervision(cache: Cache) -> Summary:
    """Return the figures of the samples' supervised tokens as JSON."""
    supervised = cache.supervised
    return {
        **_distribution(supervised),
        "share": _share(int(supervised.sum()), int(cache.lengths.sum())),
        "samples_without": int((supervised == 0).sum()),
    }


def summarise_sources(cache: Cache) -> list[JsonValue]:
    """Return the figures of each part of a blend as JSON, nothing for a store of one source."""
    shares = source_shares(cache.sources, cache.source, cache.lengths, cache.supervised) if cache.sources else []
    total = sum(part.tokens for part in shares)
    return [
        {
            "name": part.name,
            "samples": part.samples,
            "tokens": part.tokens,
            "token_share": _share(part.tokens, total),
            "mean_length": _share(part.tokens, part.samples),
            "supervised": part.supervised,
            "supervised_share": _share(part.supervised, part.tokens),
        }
        for part in shares
    ]


def _distribution(counts: np.ndarray) -> Summary:
    some = len(counts) > 0
    ordered = np.sort(counts)
    return {
        "tokens": int(counts.sum()),
        "mean": float(counts.mean()) if some else None,
        "std": float(counts.std()) if some else None,
        "min": int(ordered[0]) if some else None,
        "max": int(ordered[-1]) if some else None,
        "quantiles": {
            name: int(ordered[max(0, math.ceil(share * len(ordered)) - 1)]) if some else None
            for name, share in QUANTILES.items()
        },
    }


def _histogram(lengths: np.ndarray, longest: int) -> Summary:
    """Return counts in bins of equal width; a bin is from its edge to below the next, but for the last."""
    width = math.ceil((longest + 1) / _LENGTH_BINS)
    bins = math.ceil((longest + 1) / width)
    counts = np.bincount(lengths // width, minlength=bins)
    return {"width": width, "starts": [place * width for place in range(bins)], "counts": counts.tolist()}


def summarise_ids(counts: np.ndarray, size: int | None, decode: Decode | None) -> Summary:
    """Return the figures of some tokens by their ``counts``, (V,), as JSON.

    ``size`` is how many ids the target knows, if that is known; ``decode`` turns ids into their texts.
    """
    order = np.argsort(-counts, kind="stable")  # equal counts in the order of their ids
    ranked = counts[order]
    used = int(np.count_nonzero(ranked))
    total = int(ranked.sum())
    reached = np.cumsum(ranked)
    ranks = _rank_points(used, _RANK_POINTS)
    return {
        "tokens": total,
        "used": used,
        "share_used": used / size if size else None,
        "entropy_bits": _entropy(ranked[:used], total),
        "coverage": [
            {"ids": ids, "share": int(reached[min(ids, len(reached)) - 1]) / total if total else None}
            for ids in COVERAGE_IDS
            if ids < (size or used)
        ],
        "needed": [
            {"share": share, "ids": int(np.searchsorted(reached, share * total, "left")) + 1 if total else None}
            for share in NEEDED_SHARES
        ],
        "top": _top(order[: min(used, TOP_IDS)], ranked, total, decode),
        "by_rank": {"rank": ranks.tolist(), "count": ranked[ranks - 1].tolist()},
    }


def _top(ids: np.ndarray, ranked: np.ndarray, total: int, decode: Decode | None) -> list[JsonValue]:
    named: list[int] = ids.tolist()
    texts: list[str | None] = [*decode(named)] if decode is not None else [None] * len(named)
    return [
        {"id": token, "text": text, "count": int(count), "share": int(count) / total}
        for token, text, count in zip(named, texts, ranked.tolist()[: len(named)], strict=True)
    ]


def _entropy(counts: np.ndarray, total: int) -> float | None:
    """Return the entropy in bits of the next token without any context; None without tokens."""
    if not total:
        return None
    shares = counts / total
    return float(-(shares * np.log2(shares)).sum()) + 0.0  # no minus before a zero


def figure_text(value: JsonValue, form: Form = "number") -> str:
    """Return how a value is written: whole numbers in full, others with four significant digits, null as a dash.

    "percent" is for shares, "power" for exponents of two, "id" for whole numbers that count nothing, "token" for a
    token's text, whose white space is shown.
    """
    if value is None:
        return "–"  # noqa: RUF001 - a dash, no minus
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return _token_text(value) if form == "token" else value
    if not isinstance(value, int | float):
        raise ValueError(f"a figure is a number, a text or null, got {type(value).__name__}")
    if form == "percent":
        return "< 0.01 %" if 0 < value < 0.00005 else f"{100 * value:.2f} %"
    if form == "power":
        return f"2^{value}"
    if form == "id":
        return str(value)
    return f"{value:,}" if isinstance(value, int) else _decimal(value)


def _decimal(value: float) -> str:
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3e}"
    return f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"


def _token_text(text: str) -> str:
    shown = (_VISIBLE.get(letter, letter) for letter in text)
    return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in shown)
