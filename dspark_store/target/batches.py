"""The batches of a capture: which samples of a shard share a forward, padded and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.token_shards import TokenRows

_RULE = "longest first within a shard, padded right to the longest of the batch"
_RULE_BY_TOKENS = f"{_RULE}, as many as fit into batch_tokens with their padding, and at least one"


@dataclass(frozen=True, slots=True)
class PaddedTokens:
    """The most tokens that a batch may have, its padding included; a longer sample is a batch of its own."""

    most: int


type BatchLimit = int | PaddedTokens
"""What bounds a batch: its samples, or its padded tokens."""


def batching_fields(limit: BatchLimit) -> dict[str, JsonValue]:
    """Return the fields of a store's identity that say how its batches are formed."""
    if isinstance(limit, PaddedTokens):
        return {"batch_tokens": limit.most, "batching": _RULE_BY_TOKENS}
    return {"batch_size": limit, "batching": _RULE}


def recorded_limit(manifest: Mapping[str, JsonValue]) -> BatchLimit | None:
    """Return what bounded the batches of a store, None when its manifest does not say it in whole numbers."""
    size, tokens = manifest.get("batch_size"), manifest.get("batch_tokens")
    if isinstance(tokens, int):
        return PaddedTokens(tokens)
    return size if isinstance(size, int) else None


def batches_of(lengths: Sequence[int], limit: BatchLimit) -> list[list[int]]:
    """Return the rows of each batch: longest first, equal lengths in row order, as many as ``limit`` lets in.

    A pure function of the shard's lengths, so that a batch's composition, and with it every bit of its states, does
    not depend on who runs it or when.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batches, first = list[list[int]](), 0
    while first < len(order):
        fit = limit.most // max(1, lengths[order[first]]) if isinstance(limit, PaddedTokens) else limit
        batches.append(order[first : first + max(1, fit)])
        first += len(batches[-1])
    return batches


def forward_cost(lengths: Sequence[int], limit: BatchLimit) -> int:
    """Return the positions that a shard's forwards run over, padding included."""
    return sum(len(batch) * max(1, *(lengths[row] for row in batch)) for batch in batches_of(lengths, limit))


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
