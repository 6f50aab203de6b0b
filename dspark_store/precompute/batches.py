"""Which samples of a shard share a forward. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

BATCHING_RULE = "longest first within a shard, padded right to the longest of the batch"


def batches_of(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Return the rows of each batch: longest first, equal lengths in row order, ``batch_size`` at a time.

    A pure function of the shard's lengths, so that a batch's composition, and with it every bit of its states, does
    not depend on who runs it or when.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    return [order[first : first + batch_size] for first in range(0, len(order), batch_size)]


def forward_cost(lengths: Sequence[int], batch_size: int) -> int:
    """Return the positions that a shard's forwards run over, padding included."""
    return sum(len(batch) * max(1, *(lengths[row] for row in batch)) for batch in batches_of(lengths, batch_size))
