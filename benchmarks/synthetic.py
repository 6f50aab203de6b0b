"""States for measurements where no real store is given: normal values under log-normal channel scales.

Real states have a few strong channels and about 2.7 bits of entropy in the high byte of a bfloat16; so have these.
"""

from __future__ import annotations

import torch


def synthetic_states(tokens: int, width: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return (tokens, width) states of ``dtype``, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randn(width, generator=generator).mul_(0.35).exp_()
    scales[torch.randint(width, (max(1, width // 500),), generator=generator)] *= 30
    return (torch.randn(tokens, width, generator=generator) * scales).to(dtype)
