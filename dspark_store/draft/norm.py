"""Root mean square norm (Zhang and Sennrich, 2019), made in fp32 whatever the dtypes of features and weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RmsNorm(nn.Module):
    """Scales the last axis to a root mean square of one, then by a learned weight."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.width = width
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, features: Tensor) -> Tensor:
        """Return features (..., width) of the same dtype."""
        normed = F.rms_norm(features.float(), (self.width,), eps=self.epsilon)
        return (normed * self.weight.float()).to(features.dtype)
