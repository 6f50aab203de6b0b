"""Count, mean, spread and ends of numbers that come in pieces."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Moments:
    """What is kept of some numbers: how many, their sum, the sum of their squares, the least and the greatest.

    Sums are float64. Without numbers ``low`` is infinite, ``high`` minus infinite, and there is no mean.
    """

    count: int = 0
    total: float = 0.0
    square: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def merge(self, later: Moments) -> Moments:
        """Return the moments of both."""
        return Moments(
            self.count + later.count,
            self.total + later.total,
            self.square + later.square,
            min(self.low, later.low),
            max(self.high, later.high),
        )

    @property
    def mean(self) -> float | None:
        """The mean, None without numbers."""
        return self.total / self.count if self.count else None

    @property
    def std(self) -> float | None:
        """The standard deviation of these very numbers, not an estimate of a larger set's; None without numbers."""
        if not self.count:
            return None
        mean = self.total / self.count
        return math.sqrt(max(0.0, self.square / self.count - mean * mean))


def moments_of(values: np.ndarray) -> Moments:
    """Return the moments of finite float64 numbers."""
    if not values.size:
        return Moments()
    return Moments(values.size, float(values.sum()), float((values * values).sum()), *_ends(values))


def _ends(values: np.ndarray) -> tuple[float, float]:
    return float(values.min()), float(values.max())
