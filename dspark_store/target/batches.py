"""The batches of a capture: which samples of a shard share a forward, padded and checked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dspark_store.format.token_shards import TokenRows

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


def padded_batch(rows: TokenRows, batch: Sequence[int], pad_token_id: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the ids and the attention mask (B, longest) int64 of some rows of a shard, padded right, on the CPU.

    ValueError when a token id is negative or has no row in an embedding of ``vocab_size`` rows: on a GPU the look-up of
    such an id ends in an error that the process cannot recover from.
    """
    width = max(1, *(rows.lengths[row] for row in batch))
    ids = torch.full((len(batch), width), pad_token_id)
    attention = torch.zeros((len(batch), width), dtype=torch.int64)
    for position, row in enumerate(batch):
        length = rows.lengths[row]
        ids[position, :length] = torch.from_numpy(rows.ids[row].astype(np.int64))
        attention[position, :length] = 1
    outside = (ids < 0) | (ids >= vocab_size)
    if bool(outside.any()):
        raise ValueError(
            f"token id {int(ids[outside][0])} has no row in the target's embedding of {vocab_size} rows: "
            "tokenizer and target do not belong together"
        )
    return ids, attention
