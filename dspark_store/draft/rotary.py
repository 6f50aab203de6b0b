"""Rotary positions (Su et al., "RoFormer", 2021), halves rotated as in Llama."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (B, 1, P, head_dim) fp32 for positions (B, P).

    They are fp32 whatever the model was cast to: bf16 cannot tell neighbouring positions apart.
    """
    powers = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[:, None, :, None].float() * theta**-powers
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads (B, heads, P, head_dim) in the dtype of the angles; return them in their own.

    Queries and keys are then of the values' dtype, as flex attention asks and as SDPA is fastest.
    """
    first, second = heads.chunk(2, dim=-1)
    return (heads * cos + torch.cat([-second, first], dim=-1) * sin).to(heads.dtype)
