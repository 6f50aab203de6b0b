"""How far a draft's distribution is from its teacher's, in memory that does not grow with the number of tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 128


def l1_distance(draft: Tensor, teacher: Tensor, chunk: int = CHUNK_TOKENS) -> Tensor:
    """Return the L1 distance (...) fp32, from 0 to 2, of the softmax of two logits (..., V).

    Probabilities are fp32 and made ``chunk`` tokens at a time, anew in the backward pass: they are never held for all
    tokens. The teacher gets no gradient.
    """
    shape = draft.shape[:-1]
    draft, teacher = draft.flatten(0, -2), teacher.detach().flatten(0, -2)
    pieces = zip(torch.split(draft, chunk), torch.split(teacher, chunk), strict=True)
    parts = [checkpoint(_distance, one, other, use_reentrant=False, preserve_rng_state=False) for one, other in pieces]
    return torch.cat(parts).view(shape)


def _distance(draft: Tensor, teacher: Tensor) -> Tensor:
    return (draft.float().softmax(-1) - teacher.float().softmax(-1)).abs().sum(-1)
