"""How much of the vocabulary is used, which ids most, and how few of them make up most tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.inspection.stats.layer_summary import Summary, rank_points
from dspark_store.inspection.stats.token_tally import TokenTally

type Decode = Callable[[Sequence[int]], list[str]]

COVERAGE_IDS = (100, 1000, 4000, 8000, 16000, 32000, 64000, 128000)
"""Sizes of a draft vocabulary of the most frequent ids that are looked at."""
NEEDED_SHARES = (0.5, 0.9, 0.95, 0.99, 0.999)
TOP_IDS = 30
_RANK_POINTS = 64


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
