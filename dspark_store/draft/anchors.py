"""Anchors: the positions that blocks begin at, drawn among those whose next token is supervised."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
