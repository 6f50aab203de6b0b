"""Blocks: what stands in the slots after each anchor, what each slot is to predict, and whether that counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_store.draft.anchors import Anchors, anchor_candidates, draw_anchors


@dataclass(frozen=True, slots=True)
class Packing:
    """The fields of packed rows, each (B, S) int64.

    ``position_ids`` counts from 0 in each document, ``doc_remaining`` the tokens of the document after each position.
    """

    position_ids: Tensor
    doc_remaining: Tensor

    @property
    def documents(self) -> Tensor:
        """(B, S) int64: the number of the document that each position belongs to."""
        return torch.cumsum(self.position_ids == 0, dim=1) - 1


@dataclass(frozen=True, slots=True)
class Blocks:
    """N blocks of K slots in each of B rows; all (B, N, K) but ``anchors``.

    Slot k of anchor a stands at a + k and predicts the token at a + k + 1, its ``label``. ``previous`` is the token
    before the label (the anchor's own for k = 0), ``sources`` the position whose last hidden state is the teacher's.
    ``supervised`` says which slots count: each up to the first of its block whose label is not supervised.
    """

    anchors: Anchors
    labels: Tensor
    previous: Tensor
    sources: Tensor
    supervised: Tensor

    @property
    def block_size(self) -> int:
        """K, the slots of a block."""
        return self.labels.shape[2]

    @property
    def live(self) -> Tensor:
        """(B, N) bool: whether any slot of a block counts."""
        return self.supervised.any(dim=2)


def blocks_at(
    anchors: Anchors, input_ids: Tensor, loss_mask: Tensor, block_size: int, doc_remaining: Tensor | None = None
) -> Blocks:
    """Lay blocks at anchors over ``input_ids`` and ``loss_mask``, (B, S)."""
    last = input_ids.shape[1] - 1
    slots = torch.arange(block_size, device=input_ids.device)
    targets = anchors.positions[:, :, None] + slots + 1
    kept = anchors.kept[:, :, None]
    labels_at = torch.where(kept, targets.clamp(max=last), 0)
    sources = (labels_at - 1).clamp(min=0)
    supervised = kept & (targets <= last) & _at(loss_mask, labels_at).bool()
    if doc_remaining is not None:
        supervised &= slots + 1 <= _at(doc_remaining, anchors.positions)[:, :, None]
    supervised = supervised.long().cumprod(dim=2).bool()
    return Blocks(anchors, _at(input_ids, labels_at), _at(input_ids, sources), sources, supervised)


def draw_blocks(
    input_ids: Tensor,
    loss_mask: Tensor,
    keys: Tensor,
    *,
    num_anchors: int,
    block_size: int,
    doc_remaining: Tensor | None = None,
) -> Blocks:
    """Draw anchors by ``keys`` (B, >= S - 1), and lay blocks at them; see `draw_anchors` and `blocks_at`."""
    anchors = draw_anchors(anchor_candidates(loss_mask, doc_remaining), keys, num_anchors)
    return blocks_at(anchors, input_ids, loss_mask, block_size, doc_remaining)


def _at(rows: Tensor, positions: Tensor) -> Tensor:
    """Return the values of each row (B, S) at positions (B, ...)."""
    return torch.gather(rows, 1, positions.flatten(1)).view(positions.shape)
