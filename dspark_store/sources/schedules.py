"""In which order a blend takes records of its parts. Pure arithmetic.

Every schedule is greedy: each step takes from the part that lies furthest behind its share, the lowest-numbered one of
equals. With weight `w` of sum 1 and `c` records taken, the score of a part at step `g`, counted from 0, is
`w * max(g, 1) - c` in Megatron-LM's rule and `w * (g + 1) - c` in hyper-parallel's, in float64. Neither keeps every
prefix within one record of its share, though both stay close: within 1.4 with a handful of parts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dspark_store.sources.source import SourceError

MAX_PARTS = 2**16 - 1
"""The most parts of a blend: a part's number is a uint16, whose largest value means that there is none."""

_MEGATRON_SURPLUS = 1.005
_REACH: Mapping[str, Callable[[int], int]] = {
    "megatron": lambda step: max(step, 1),
    "hyper_parallel": lambda step: step + 1,
}


def weighted_schedule(
    rule: Literal["megatron", "hyper_parallel"],
    weights: Sequence[float],
    size: int,
    limits: Sequence[int] | None = None,
) -> NDArray[np.uint16]:
    """Return the part of each of `size` steps by the weighted rule of a project.

    Args:
        rule: of Megatron-LM or of hyper-parallel.
        weights: positive and finite, of any sum.
        size: steps.
        limits: the most records of each part; the schedule ends before the step that would take another. None: no end.

    """
    return _greedy(weights, size, _REACH[rule], limits)


def exhaustive_schedule(lengths: Sequence[int], weights: Sequence[float] | None = None) -> NDArray[np.uint16]:
    """Return an order that takes each of `lengths` records of every part exactly once.

    It is Megatron-LM's rule, and a part that is used up leaves the race. Without weights a part's share is that of its
    length, so that any prefix has the mixture of the whole; with weights their mixture holds until the first part ends.
    ValueError when a length is not positive.
    """
    if min(lengths) < 1:
        raise ValueError(f"a part of length {min(lengths)} cannot be scheduled; expected at least 1")
    return _greedy(
        lengths if weights is None else weights, sum(lengths), _REACH["megatron"], lengths, others_go_on=True
    )


def local_indices(sequence: NDArray[np.uint16]) -> NDArray[np.int64]:
    """Return how often each step's part was taken before it: the record of the part, where nothing is repeated."""
    local = np.empty(len(sequence), np.int64)
    for part in np.unique(sequence):
        of_part = np.flatnonzero(sequence == part)
        local[of_part] = np.arange(len(of_part))
    return local


def megatron_requests(weights: Sequence[float], size: int) -> list[int]:
    """Return how many records Megatron-LM builds of each part: its share of `size`, and half a percent more."""
    return [math.ceil(math.ceil(size * weight) * _MEGATRON_SURPLUS) for weight in normalised(weights)]


def check_weights(weights: Sequence[float | None]) -> None:
    """Raise SourceError unless all are None, or all finite, none negative, and at least one above 0."""
    given = [weight for weight in weights if weight is not None]
    if not given:
        return
    if len(given) < len(weights):
        raise SourceError(
            f"part {weights.index(None)} of a blend has no weight, and others have; give a weight to all or to none"
        )
    for number, weight in enumerate(given):
        if not math.isfinite(weight) or weight < 0:
            raise SourceError(f"the weight of part {number} of a blend is {weight}; expected a finite number >= 0")
    if not any(given):
        raise SourceError("every weight of a blend is 0; expected at least one above 0")
    if not math.isfinite(sum(given)):
        raise SourceError(f"the weights of a blend add up to {sum(given)}; give smaller ones")


def normalised(weights: Sequence[float]) -> list[float]:
    """Return the weights divided by their sum, in float64."""
    total = sum(weights)
    return [weight / total for weight in weights]


def _greedy(
    weights: Sequence[float],
    size: int,
    reach: Callable[[int], int],
    limits: Sequence[int] | None,
    *,
    others_go_on: bool = False,
) -> NDArray[np.uint16]:
    sequence = np.empty(size, np.uint16)
    shares = normalised(weights)
    left = [size + 1] * len(shares) if limits is None else list(limits)
    parts, taken = list(range(len(shares))), [0] * len(shares)
    for step in range(size):
        factor = reach(step)
        scores = [share * factor - count for share, count in zip(shares, taken, strict=True)]
        best = scores.index(max(scores))
        if taken[best] == left[best]:
            return sequence[:step].copy()
        sequence[step] = parts[best]
        taken[best] += 1
        if others_go_on and taken[best] == left[best]:
            del parts[best], shares[best], taken[best], left[best]
    return sequence
