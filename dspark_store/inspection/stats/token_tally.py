"""How often each token id stands in some samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_UNNAMED_VOCABULARY = 1 << 22


@dataclass(frozen=True, slots=True)
class TokenTally:
    """``counts`` and ``supervised`` (V,) int64 by id, of all tokens and of the supervised ones.

    ``outside`` counts tokens whose id is not in the vocabulary.
    """

    counts: np.ndarray
    supervised: np.ndarray
    outside: int = 0

    def merge(self, later: TokenTally) -> TokenTally:
        """Return the tally of both; they may know different numbers of ids."""
        return TokenTally(
            _sum(self.counts, later.counts), _sum(self.supervised, later.supervised), self.outside + later.outside
        )


def empty_tokens(vocabulary: int | None) -> TokenTally:
    """Return the tally of no tokens."""
    return TokenTally(np.zeros(vocabulary or 0, np.int64), np.zeros(vocabulary or 0, np.int64))


def tally_tokens(ids: np.ndarray, mask: np.ndarray, vocabulary: int | None) -> TokenTally:
    """Count some ids and their mask, both (tokens,).

    ``vocabulary`` is how many ids the target knows; where no manifest says so, there are as many as occur, and 4 Mi at
    most, so that one damaged id does not take all memory.
    """
    known = (ids >= 0) & (ids < (vocabulary or _UNNAMED_VOCABULARY))
    kept = ids[known]
    counts = np.bincount(kept, minlength=vocabulary or 0)
    supervised = np.bincount(kept[mask[known] == 1], minlength=len(counts))
    return TokenTally(counts, supervised, int(len(ids) - len(kept)))


def _sum(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    if len(one) < len(other):
        one, other = other, one
    total = one.copy()
    total[: len(other)] += other
    return total
