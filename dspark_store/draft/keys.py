"""Random keys of positions, from which anchors are drawn: a pure function of the sample, or of a generator."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_TAG = np.uint64(0x616E63686F727300)


def generated_keys(rows: int, width: int, generator: torch.Generator | None = None) -> Tensor:
    """Return keys (rows, width) int64 from a generator of torch."""
    return torch.randint(0, 2**62, (rows, width), generator=generator)


def sample_keys(samples: Tensor, width: int, *, seed: int, epoch: int) -> Tensor:
    """Return keys (B, width) int64 of the positions of ``samples`` (B,) in an epoch.

    A key depends on (seed, epoch, sample, position) alone: neither on the batch that a sample stands in, nor on its
    padding, the number of ranks or what was drawn before. By SplitMix64 (Steele, Lea and Flood, 2014).
    """
    with np.errstate(over="ignore"):
        state = _mix(np.array([seed], np.uint64) ^ _TAG)
        state = _mix(state + np.uint64(epoch) * _GAMMA + _GAMMA)
        rows = _mix(state + samples.cpu().numpy().astype(np.uint64) * _GAMMA + _GAMMA)
        keys = _mix(rows[:, None] + np.arange(1, width + 1, dtype=np.uint64) * _GAMMA)
    return torch.from_numpy((keys >> np.uint64(2)).astype(np.int64)).to(samples.device)


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = state ^ (state >> np.uint64(31))
    return mixed
