"""The statistics of a store as JSON: what ``stats.json`` holds and its page shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.schema import LAST, LAYERS
from dspark_store.inspection.stats.layer_figures import QUANTILES, Summary, rank_points, spread, summarise_layer
from dspark_store.inspection.stats.survey import Selection, StatesTally, Survey, survey_store, vocabulary_size
from dspark_store.inspection.stats.tallies import TokenTally, empty_tokens
from dspark_store.readers.cache import Cache

STATISTICS_VERSION = 1
DEFAULT_OUTLIER_FACTOR = 10.0
_BINS = 32
type Decode = Callable[[Sequence[int]], list[str]]

COVERAGE_IDS = (100, 1000, 4000, 8000, 16000, 32000, 64000, 128000)
"""Sizes of a draft vocabulary of the most frequent ids that are looked at."""
NEEDED_SHARES = (0.5, 0.9, 0.95, 0.99, 0.999)
TOP_IDS = 30
_RANK_POINTS = 64


@dataclass(frozen=True, slots=True)
class Rules:
    """What is read, and by which measure: see `Selection` and `summarise_layer`."""

    selection: Selection = field(default_factory=Selection)
    outlier_factor: float = DEFAULT_OUTLIER_FACTOR

    def __post_init__(self) -> None:
        if not self.outlier_factor >= 1:
            raise ValueError(f"--outlier-factor must be >= 1, got {self.outlier_factor}")


def measure_store(
    cache: Cache,
    rules: Rules,
    *,
    threads: int | None = None,
    scheduler: str | None = None,
    progress: Callable[[int], None] | None = None,
    decode: Decode | None = None,
) -> dict[str, JsonValue]:
    """Return the statistics of a store as JSON, in one pass; see `survey_store` for what it takes and raises.

    They are the same, bit by bit, however many threads or workers there are. ``decode`` turns ids into their texts.
    """
    survey = survey_store(cache, rules.selection, threads=threads, scheduler=scheduler, progress=progress)
    states = survey.tally.states if survey.tally is not None else None
    tokens = survey.tally.tokens if survey.tally is not None else empty_tokens(None)
    return {
        "version": STATISTICS_VERSION,
        "store": _identity(cache, survey),
        "read": _extent(survey, rules.selection),
        "lengths": summarise_lengths(cache),
        "supervision": summarise_supervision(cache),
        "sources": summarise_sources(cache),
        "vocabulary": summarise_vocabulary(tokens, vocabulary_size(cache), decode),
        **_states(cache, survey, states, rules.outlier_factor),
    }


def _identity(cache: Cache, survey: Survey) -> Summary:
    schema = cache.schema
    return {
        "path": str(cache.storage),
        "store_id": cache.record.store_id,
        "phase": cache.record.phase,
        "target_model": cache.manifest.get("target_model"),
        "dtype": schema.dtype.logical,
        "codec": schema.codec,
        "samples": schema.num_samples,
        "seq_length": schema.seq_length,
        "hidden_size": schema.hidden_size,
        "layer_ids": list(schema.layer_ids),
        "shards": schema.tokens.num_shards,
        "captured_shards": survey.captured,
        "nonfinite_samples": int((cache.status == 1).sum()) if cache.record.complete else None,
    }


def _extent(survey: Survey, selection: Selection) -> Summary:
    states = survey.tally.states if survey.tally is not None else None
    return {
        "samples": survey.tally.samples if survey.tally is not None else 0,
        "samples_with_states": states.samples if states is not None else 0,
        "drawn": selection.samples is not None,
        "seed": selection.seed if selection.samples is not None else None,
        "layers": list(survey.layers),
        "last_hidden_states": selection.last,
    }


def _states(cache: Cache, survey: Survey, states: StatesTally | None, factor: float) -> dict[str, JsonValue]:
    """Return the figures of the layers, of the last hidden states and of neighbours; empty before any is captured."""
    if states is None:
        return {"layers": [], "last_hidden_states": None, "neighbours": []}
    ids = survey.layers
    layers: list[JsonValue] = [
        {"layer_id": layer, "column": LAYERS, **summarise_layer(tally, factor)}
        for layer, tally in zip(ids, states.layers, strict=True)
    ]
    neighbours: list[JsonValue] = [
        {"lower": lower, "upper": upper, "tokens": cosines.count, "cosine": spread(cosines)}
        for lower, upper, cosines in zip(ids[:-1], ids[1:], states.neighbours, strict=True)
    ]
    last: JsonValue = None
    if states.last is not None:
        same = cache.schema.layer_id(states.shared) if states.shared >= 0 else None
        last = {"column": LAST, "same_objects_as_layer": same, **summarise_layer(states.last, factor)}
    return {"layers": layers, "last_hidden_states": last, "neighbours": neighbours}


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


def summarise_vocabulary(tally: TokenTally, size: int | None, decode: Decode | None) -> Summary:
    """Return the figures of all tokens and of the supervised ones as JSON.

    ``size`` is how many ids the target knows, if that is known; ``decode`` turns ids into their texts.
    """
    return {
        "size": size,
        "outside": tally.outside,
        "all": _usage(tally.counts, size, decode),
        "supervised": _usage(tally.supervised, size, decode),
    }


def _usage(counts: np.ndarray, size: int | None, decode: Decode | None) -> Summary:
    order = np.argsort(-counts, kind="stable")  # equal counts in the order of their ids
    ranked = counts[order]
    used = int(np.count_nonzero(ranked))
    total = int(ranked.sum())
    reached = np.cumsum(ranked)
    ranks = rank_points(used, _RANK_POINTS)
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
