"""How far a draft's distribution is from its teacher's and from the text, in memory that does not grow with tokens."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from dspark_store.draft.pieces import PIECE_TOKENS, by_pieces


def l1_distance(draft: Tensor, teacher: Tensor, chunk: int = PIECE_TOKENS) -> Tensor:
    """Return the L1 distance (...) fp32, from 0 to 2, of the softmax of two logits (..., V).

    Probabilities are fp32, of ``chunk`` tokens at a time. The teacher gets no gradient.
    """
    distances = by_pieces(_distance, draft.flatten(0, -2), teacher.detach().flatten(0, -2), chunk)
    return distances.view(draft.shape[:-1])


def cross_entropy(draft: Tensor, labels: Tensor, chunk: int = PIECE_TOKENS) -> Tensor:
    """Return the cross-entropy (...) fp32 of logits (..., V) to ``labels`` (...), of ``chunk`` tokens at a time."""
    return by_pieces(_cross_entropy, draft.flatten(0, -2), labels.flatten(), chunk).view(labels.shape)


def _distance(draft: Tensor, teacher: Tensor) -> Tensor:
    return (draft.float().softmax(-1) - teacher.float().softmax(-1)).abs().sum(-1)


def _cross_entropy(draft: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(draft.float(), labels, reduction="none")
