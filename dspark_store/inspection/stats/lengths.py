"""How long samples are, how much of them is supervised, and from which source they came: from the index alone."""

from __future__ import annotations

import math

import numpy as np

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.inspection.stats.layer_summary import QUANTILES, Summary
from dspark_store.readers.cache import Cache

_BINS = 32


def summarise_lengths(cache: Cache) -> Summary:
    """Return the figures of all samples' lengths, in tokens, as JSON."""
    lengths, longest = cache.lengths, cache.schema.seq_length
    full = int((lengths == longest).sum())
    return {
        "samples": len(lengths),
        **_distribution(lengths),
        "full": full,
        "full_share": full / len(lengths) if len(lengths) else None,
        "histogram": _histogram(lengths, longest),
    }


def summarise_supervision(cache: Cache) -> Summary:
    """Return the figures of the samples' supervised tokens as JSON."""
    total, supervised = int(cache.lengths.sum()), cache.supervised
    return {
        **_distribution(supervised),
        "share": int(supervised.sum()) / total if total else None,
        "samples_without": int((supervised == 0).sum()),
    }


def summarise_sources(cache: Cache) -> list[JsonValue]:
    """Return the figures of each part of a blend as JSON, nothing for a store of one source."""
    count, total = len(cache.sources), int(cache.lengths.sum())
    if not count:
        return []
    sums = [np.bincount(cache.source, values, count) for values in (None, cache.lengths, cache.supervised)]
    figures: list[JsonValue] = []
    for name, samples, tokens, supervised in zip(cache.sources, *(column.tolist() for column in sums), strict=True):
        figures.append(
            {
                "name": name,
                "samples": int(samples),
                "tokens": int(tokens),
                "token_share": tokens / total if total else None,
                "mean_length": tokens / samples if samples else None,
                "supervised": int(supervised),
                "supervised_share": supervised / tokens if tokens else None,
            }
        )
    return figures


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
    width = math.ceil((longest + 1) / _BINS)
    bins = math.ceil((longest + 1) / width)
    counts = np.bincount(lengths // width, minlength=bins)
    return {"width": width, "starts": [place * width for place in range(bins)], "counts": counts.tolist()}
