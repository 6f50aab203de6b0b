"""The learning rate over a run: a linear warm-up, then a cosine. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST_WARMUP = 20


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the learning rate is multiplied by at each of ``total`` steps, counted from 0."""

    total: int
    warmup: int
    least: float = 0.1

    def multiplier(self, step: int) -> float:
        """Return (step + 1) / warmup while that is below one, then a cosine from 1 to ``least``."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        return self.least + (1 - self.least) * (1 + math.cos(math.pi * progress)) / 2


def warmup_steps(ratio: float, total: int, least: int = LEAST_WARMUP) -> int:
    """Return the steps of the warm-up: ``ratio`` of all, but not fewer than ``least``; 1 for no ratio above 0."""
    return max(least, int(ratio * total)) if ratio > 0 else 1
