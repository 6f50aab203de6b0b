"""Timing contenders in turn on a machine that is not quiet: what hits a whole round is taken out of its times."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

MIN_ROUNDS = 3
DECIDED = 0.01
"""A comparison is decided when the median of its ratios is known to this share, either way."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values and their quartiles."""

    low: float
    median: float
    high: float

    def rates(self, amount: float) -> Spread:
        """Return ``amount`` a second, of seconds."""
        return Spread(amount / self.high, amount / self.median, amount / self.low)


def spread(values: Sequence[float] | np.ndarray) -> Spread:
    """Return the median and the quartiles of one value or more."""
    low, median, high = np.quantile(np.asarray(values, float), (0.25, 0.5, 0.75)).tolist()
    return Spread(low, median, high)


def time_in_turn[Name: Hashable](
    actions: Mapping[Name, Callable[[], float]],
    rounds: int,
    *,
    seconds: float = float("inf"),
    until: Callable[[Mapping[Name, Sequence[float]]], bool] = lambda _: False,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[Name, list[float]]:
    """Run every action once a round, in an order that changes; return the times that they say they took.

    After ``seconds``, or when ``until`` says that enough is known, no further round begins, but three there are.
    ``progress`` is called with the actions done.
    """
    times: dict[Name, list[float]] = {name: [] for name in actions}
    order, shuffle = list(actions), random.Random(0)
    started = time.perf_counter()
    for turn in range(rounds):
        if turn >= MIN_ROUNDS and (time.perf_counter() - started > seconds or until(times)):
            break
        shuffle.shuffle(order)
        for at, name in enumerate(order):
            times[name].append(actions[name]())
            progress(turn * len(order) + at + 1)
    return times


def levelled[Name: Hashable](times: Mapping[Name, Sequence[float]]) -> dict[Name, Spread]:
    """Return each contender's spread over the rounds, with what slowed a whole round down taken out of it.

    A round's factor is the median, over the contenders, of their times in it against their own medians.
    """
    table = np.array(list(times.values()), float)
    factors = np.median(table / np.median(table, axis=1, keepdims=True), axis=0)
    return {name: spread(row) for name, row in zip(times, table / factors, strict=True)}


def decided[Name: Hashable](times: Mapping[Name, Sequence[float]]) -> bool:
    """Tell whether the rounds have settled how every contender stands to the first one.

    The error of a median is taken as 1.25 times the deviation over the square root of the rounds, with the deviation
    out of the quartiles, so that single rounds that were disturbed do not count.
    """
    first, *others = (np.asarray(values, float) for values in times.values())
    for values in others:
        ratios = spread(values / first)
        error = 1.25 * (ratios.high - ratios.low) / 1.349 / len(first) ** 0.5
        if error > DECIDED * ratios.median:
            return False
    return True
