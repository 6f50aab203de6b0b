"""Anchors and the blocks that begin at them: drawn by keys, what each slot is to predict, and whether that counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark_store.format.grid import SPLITMIX64_GAMMA, splitmix64

_GAMMA = np.uint64(SPLITMIX64_GAMMA)
_TAG = np.uint64(0x616E63686F727300)


def sample_keys(samples: Tensor, width: int, *, seed: int, epoch: int) -> Tensor:
    """Return keys (B, width) int64 of the positions of ``samples`` (B,) in an epoch.

    A key depends on (seed, epoch, sample, position) alone: neither on the batch that a sample stands in, nor on its
    padding, the number of ranks or what was drawn before. By SplitMix64.
    """
    with np.errstate(over="ignore"):
        state = splitmix64(np.array([seed], np.uint64) ^ _TAG)
        state = splitmix64(state + np.uint64(epoch) * _GAMMA + _GAMMA)
        rows = splitmix64(state + samples.cpu().numpy().astype(np.uint64) * _GAMMA + _GAMMA)
        keys = splitmix64(rows[:, None] + np.arange(1, width + 1, dtype=np.uint64) * _GAMMA)
    return torch.from_numpy((keys >> np.uint64(2)).astype(np.int64)).to(samples.device)


_LAST = torch.iinfo(torch.int64).max


@dataclass(frozen=True, slots=True)
class Anchors:
    """Positions (B, N) int64, ascending in a row, and whether each is kept, (B, N) bool.

    Rows with fewer candidates than N have position 0, not kept, in the slots that are left.
    """

    positions: Tensor
    kept: Tensor


def anchor_candidates(loss_mask: Tensor, doc_remaining: Tensor | None = None) -> Tensor:
    """Return (B, S - 1) bool: whether a block may begin at p, which takes mask[p] = mask[p + 1] = 1.

    ``doc_remaining`` (B, S) counts the tokens of a packed row's document after each position: a block may not begin at
    the last one.
    """
    supervised = loss_mask.bool()
    candidates = supervised[:, :-1] & supervised[:, 1:]
    return candidates if doc_remaining is None else candidates & (doc_remaining[:, :-1] >= 1)


def draw_anchors(candidates: Tensor, keys: Tensor, num_anchors: int) -> Anchors:
    """Draw up to ``num_anchors`` of each row's candidates (B, S - 1): those with the least keys (B, >= S - 1) int64.

    With keys that are random and independent, every set of candidates is as likely as any other. ValueError for fewer
    than one anchor.
    """
    if num_anchors < 1:
        raise ValueError(f"num_anchors must be >= 1, got {num_anchors}")
    rows, width = candidates.shape
    keys = keys[:, :width].masked_fill(~candidates, _LAST)
    drawn = torch.argsort(keys, dim=1, stable=True)[:, :num_anchors]
    kept = torch.gather(candidates, 1, drawn)
    ordered, order = torch.sort(drawn.masked_fill(~kept, width), dim=1)
    kept = torch.gather(kept, 1, order)
    positions = torch.zeros((rows, num_anchors), dtype=torch.int64, device=candidates.device)
    keep = torch.zeros((rows, num_anchors), dtype=torch.bool, device=candidates.device)
    positions[:, : drawn.shape[1]] = ordered.masked_fill(~kept, 0)
    keep[:, : drawn.shape[1]] = kept
    return Anchors(positions, keep)


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
