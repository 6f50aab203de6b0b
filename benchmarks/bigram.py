"""A bigram with a count added to every pair: what a draft must beat to have learned anything from the states."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Bigram:
    """Counted pairs of neighbouring tokens: the followers of token t are ``starts[t]`` to ``starts[t + 1]``.

    ``followers`` and ``counts`` (pairs,) are ordered by their first token, ``starts`` is (V + 1,).
    """

    vocab_size: int
    starts: np.ndarray
    followers: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, rows: Iterable[np.ndarray], vocab_size: int) -> Bigram:
        """Count the pairs of some texts, each (length,) ids below ``vocab_size``."""
        pairs = [row[:-1].astype(np.int64) * vocab_size + row[1:] for row in rows]
        codes, counts = np.unique(np.concatenate([np.empty(0, np.int64), *pairs]), return_counts=True)
        starts = np.searchsorted(codes, np.arange(vocab_size + 1) * vocab_size)
        return cls(vocab_size, starts, codes % vocab_size, counts)

    def log_probabilities(self, previous: np.ndarray, added: float) -> np.ndarray:
        """Return (n, V) float32: how likely each token is after each of ``previous`` (n,)."""
        rows = np.full((len(previous), self.vocab_size), added, np.float32)
        for row, token in zip(rows, previous.tolist(), strict=True):
            begin, end = self.starts[token], self.starts[token + 1]
            row[self.followers[begin:end]] += self.counts[begin:end]
        logarithms: np.ndarray = np.log(rows / rows.sum(axis=1, keepdims=True))
        return logarithms
