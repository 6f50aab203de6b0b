"""A whole store against its own promises, shard by shard, in threads or on a cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from dspark_store.format.damage import Problem
from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.storage import Storage
from dspark_store.inspection.shardwise import Workers
from dspark_store.progress import start_progress
from dspark_store.readers.checks.strays import Links, find_links
from dspark_store.readers.verify import survey_store
from dspark_store.text import size_text

_RANGES = 8


@dataclass(frozen=True, slots=True)
class Verification:
    """What was checked, and what was found. ``problems`` are sorted, however the shards were shared out.

    ``nbytes`` of the columns' objects were read in ``seconds``. ``links`` are no problem.
    """

    samples: int
    shards: int
    nbytes: int
    seconds: float
    quick: bool
    problems: tuple[Problem, ...]
    links: Links

    @property
    def hit(self) -> frozenset[int]:
        """The samples that some problem hits."""
        return frozenset(sample for problem in self.problems for sample in problem.samples)

    def to_json(self) -> dict[str, JsonValue]:
        """Return this as a JSON value."""
        return {
            "samples": self.samples,
            "shards": self.shards,
            "bytes": self.nbytes,
            "seconds": self.seconds,
            "quick": self.quick,
            "links": {"out": self.links.out, "folders": list(self.links.folders)},
            "problems": [problem.to_json() for problem in self.problems],
        }


def verify(storage: Storage, *, quick: bool = False, workers: Workers | None = None) -> Verification:
    """Check every object of a store; see `survey_store` and `Workers` for the options.

    FileNotFoundError or ValueError where there is no store, OSError where the scheduler, or a worker the store, cannot
    be reached.
    """
    began = time.monotonic()
    survey = survey_store(storage, quick=quick)
    problems = list(survey.problems)
    samples = nbytes = done = 0

    def rate() -> str:
        return f"{size_text(nbytes / max(time.monotonic() - began, 1e-9))}/s"

    with start_progress("verify", len(survey.shards), "shards") as progress:
        progress.reach(0, lambda: "")
        for _, verdict in (workers or Workers()).each(survey.shard_check(), survey.shards) if survey.shards else ():
            problems += verdict.problems
            samples, nbytes, done = samples + verdict.samples, nbytes + verdict.nbytes, done + 1
            progress.reach(done, rate)
    in_order = sorted(problems, key=lambda problem: problem.order)
    return Verification(samples, done, nbytes, time.monotonic() - began, quick, tuple(in_order), find_links(storage))


def ranges_text(numbers: Sequence[int], most: int = _RANGES) -> str:
    """Return ascending numbers as people read them, ``3-5, 9``; past ``most`` ranges only how many there are more."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges[:most])
    more = sum(last - first + 1 for first, last in ranges[most:])
    return f"{shown} and {more:,} more" if more else shown


def problem_line(problem: Problem) -> str:
    """Return a problem as one line: the object, what is wrong with it, and the samples that it hits."""
    if not problem.samples:
        return str(problem)
    word = "sample" if len(problem.samples) == 1 else "samples"
    return f"{problem} ({word} {ranges_text(problem.samples)})"
