"""From what a setting costs to what it gives in training, and to the one that is best there. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.setting import Setting
from dspark_store.readers.fetch import DEFAULT_OPEN_OBJECTS

TOLERANCE = 0.02
"""Rates closer than this share of the best are taken as equal: it is what measurements here can tell apart."""
SIZE_TOLERANCE = 0.005
"""Sizes closer than this share of the smallest are taken as equal."""
_OVERLAP_LOSS = 0.1
"""How much of the shorter one of reading and decoding does not hide behind the longer one: a batch begins with the
first bytes on their way and nothing to decode, and ends with the last chunks and nothing to read."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a setting costs a reader, measured on a few samples with all cores.

    ``work`` is seconds of reading and decoding from memory, with all objects open, and ``line`` the bytes read, both
    for a valid byte of states; ``open_seconds`` and ``open_bytes`` are those of opening one object.
    """

    work: float
    line: float
    open_seconds: float
    open_bytes: float


@dataclass(frozen=True, slots=True)
class Workload:
    """Random batches of ``batch_bytes`` valid bytes over ``visits`` objects, of which the share ``opened`` is not open.

    Storage gives ``storage_rate`` bytes a second; ``cores`` is the number of cores over that of the measurement.
    """

    storage_rate: float
    batch_bytes: float
    visits: float
    opened: float
    cores: float = 1.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """The rate of a setting, valid bytes a second, and the seconds a batch that storage and the cores are busy."""

    rate: float
    line_seconds: float
    work_seconds: float


def predict(cost: Cost, workload: Workload) -> Prediction:
    """Return what a setting gives: storage and cores work at the same time, but for the ends of a batch."""
    opens = workload.visits * workload.opened
    line = (workload.batch_bytes * cost.line + opens * cost.open_bytes) / workload.storage_rate
    work = workload.batch_bytes * cost.work / workload.cores + opens * cost.open_seconds
    seconds = max(line, work) + _OVERLAP_LOSS * min(line, work)
    return Prediction(workload.batch_bytes / seconds, line, work)


def opened_share(samples: int, shard_size: int, layers: int, open_objects: int = DEFAULT_OPEN_OBJECTS) -> float:
    """Return the share of visits that find their object closed, in a store read in random order."""
    objects = -(-samples // shard_size) * layers
    return max(0.0, 1 - open_objects / objects)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setting and what it comes to: rate in valid bytes a second, stored bytes a valid byte, objects a sample."""

    setting: Setting
    rate: float
    stored: float
    objects: float


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate to take.

    Of those whose rate is within 2 % of the best, the smallest stores; of those within 0.5 % of the smallest, the one
    of fewest objects, and then the fastest. ValueError when there is no candidate.
    """
    if not candidates:
        raise ValueError("there is no setting to choose from")
    best = max(candidate.rate for candidate in candidates)
    fast = [candidate for candidate in candidates if candidate.rate >= (1 - TOLERANCE) * best]
    smallest = min(candidate.stored for candidate in fast)
    small = [candidate for candidate in fast if candidate.stored <= (1 + SIZE_TOLERANCE) * smallest]
    return min(small, key=lambda candidate: (candidate.objects, -candidate.rate, candidate.setting))


@dataclass(frozen=True, slots=True)
class Plan:
    """The store that is planned, and where it is read: samples, K, mean valid bytes a sample, storage, cores.

    ``scattered`` overrides what follows from the number of samples: whether a visit finds its object open.
    """

    samples: int
    layers: int
    sample_bytes: float
    batch: int
    storage_rate: float
    cores: float = 1.0
    scattered: bool | None = None

    def workload(self, setting: Setting) -> Workload:
        """Return how training reads a store of a setting."""
        opened = opened_share(self.samples, setting.shard_size, self.layers)
        if self.scattered is not None:
            opened = float(self.scattered)
        visits = self.batch * self.layers / setting.layers
        return Workload(self.storage_rate, self.batch * self.sample_bytes, visits, opened, self.cores)


@dataclass(frozen=True, slots=True)
class Known:
    """What the search found out about one setting."""

    cost: Cost
    stored: float
    correction: float = 1.0

    def corrected(self, factor: float) -> Known:
        """Return the same, its rate multiplied by a factor: what a measurement gave over what was predicted."""
        return replace(self, correction=factor)


def candidates(known: Mapping[Setting, Known], plan: Plan) -> list[Candidate]:
    """Return every setting with its predicted rate."""
    return [
        Candidate(
            setting,
            predict(found.cost, plan.workload(setting)).rate * found.correction,
            found.stored,
            -(-plan.samples // setting.shard_size) * plan.layers / plan.samples,
        )
        for setting, found in known.items()
    ]
