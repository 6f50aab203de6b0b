"""Functions of whole vocabularies, a piece of the tokens at a time, so that no vocabulary is held for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

PIECE_TOKENS = 128


def by_pieces(function: Callable[..., Tensor], size: int, *tensors: Tensor) -> Tensor:
    """Return ``function`` (m, n) of each n = ``size`` rows of all tensors (T, ...), side by side: (m, T).

    What it makes on its way is made anew in the backward pass.
    """
    pieces = zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)
    with _weights_cast_anew():
        parts = [checkpoint(function, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    return torch.cat(parts, dim=1)


@contextmanager
def _weights_cast_anew() -> Iterator[None]:
    """Have autocast keep no copies of weights: the pieces' gradients would be summed in the dtype of the copy."""
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(kept)
