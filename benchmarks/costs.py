"""What an action costs: seconds, processor seconds, resident memory; and contenders timed in turn.

A machine is never quiet: contenders run in rounds, and what hits a whole round is taken out of its times.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

MIN_ROUNDS = 3
DECIDED = 0.01
"""A comparison is decided when the median of its ratios is known to this share, either way."""
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Elapsed:
    """How long something took: seconds by the clock, and of the processor over all threads of this process."""

    clock: float
    processor: float


def elapsed(action: Callable[[], object], device: torch.device = CPU) -> Elapsed:
    """Run an action and wait for the device; what was queued on it before does not count."""
    wait_for(device)
    started = time.perf_counter(), time.process_time()
    action()
    wait_for(device)
    return Elapsed(time.perf_counter() - started[0], time.process_time() - started[1])


def wait_for(device: torch.device) -> None:
    """Wait until a CUDA device has done what was queued on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def resident_bytes(field: str = "VmRSS") -> int:
    """Return a line of this process's /proc status in bytes: VmRSS now, or VmHWM, the peak since the last reset.

    LookupError when there is no such line.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {field}")


def peak_of(action: Callable[[], object]) -> int:
    """Run an action; return the most bytes that were resident meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")
    action()
    return resident_bytes("VmHWM")


def in_own_process[Result](function: Callable[..., Result], *arguments: object) -> Result:
    """Call a function of a module in a fresh process, so that memory and threads are its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values and their quartiles."""

    low: float
    median: float
    high: float

    def rates(self, amount: float) -> Spread:
        """Return ``amount`` per second, of seconds."""
        return Spread(amount / self.high, amount / self.median, amount / self.low)


def spread(values: Sequence[float] | np.ndarray) -> Spread:
    """Return the median and the quartiles of one value or more."""
    low, median, high = np.quantile(np.asarray(values, float), (0.25, 0.5, 0.75)).tolist()
    return Spread(low, median, high)


def time_in_turn[Name: Hashable, Time](
    actions: Mapping[Name, Callable[[], Time]],
    rounds: int,
    *,
    seconds: float = float("inf"),
    until: Callable[[Mapping[Name, Sequence[Time]]], bool] = lambda _: False,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> dict[Name, list[Time]]:
    """Run every action once a round, in an order that changes; return the times that they say they took.

    After ``seconds``, or when ``until`` says that enough is known, no further round begins, but three there are.
    ``progress`` is called with the actions done, and how many there are at most.
    """
    times: dict[Name, list[Time]] = {name: [] for name in actions}
    order, shuffle = list(actions), random.Random(0)
    started = time.perf_counter()
    for turn in range(rounds):
        if turn >= MIN_ROUNDS and (time.perf_counter() - started > seconds or until(times)):
            break
        shuffle.shuffle(order)
        for at, name in enumerate(order):
            times[name].append(actions[name]())
            progress(turn * len(order) + at + 1, rounds * len(order))
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
