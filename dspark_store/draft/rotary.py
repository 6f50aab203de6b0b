"""Rotary positions (Su et al., "RoFormer", 2021), halves rotated as in Llama."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (B, 1, P, head_dim) of ``dtype`` for positions (B, P).

    Frequencies and angles are fp32 whatever the model was cast to: bf16 cannot tell neighbouring positions apart.
    """
    powers = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[:, None, :, None].float() * theta**-powers
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads (B, heads, P, head_dim)."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin
