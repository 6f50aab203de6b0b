"""Functions of whole vocabularies, a piece of the tokens at a time, so that no vocabulary is held for all of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

PIECE_TOKENS = 128


def by_pieces(function: Callable[..., Tensor], size: int, *tensors: Tensor) -> Tensor:
    """Return ``function`` (m, n) of each n = ``size`` rows of all tensors (T, ...), side by side: (m, T).

    What it makes on its way is made anew in the backward pass.
    """
    pieces = zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)
    parts = [checkpoint(function, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    return torch.cat(parts, dim=1)
