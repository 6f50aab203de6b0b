"""Functions of logits, a piece of the tokens at a time: what they make of a whole vocabulary is never held for all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

PIECE_TOKENS = 128


def by_pieces(function: Callable[[Tensor, Tensor], Tensor], first: Tensor, second: Tensor, size: int) -> Tensor:
    """Return ``function`` (n,) of each ``size`` rows of two tensors (T, ...), one after the other: (T,).

    What it makes on its way is made anew in the backward pass.
    """
    pairs = zip(torch.split(first, size), torch.split(second, size), strict=True)
    parts = [checkpoint(function, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs]
    return torch.cat(parts)
