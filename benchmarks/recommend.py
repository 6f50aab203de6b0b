"""From a few encoded and decoded samples to what each setting gives in training, and to the one that is best there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.costs import Spread, decided, levelled, time_in_turn
from benchmarks.measure import BATCH, Axes, Setting, Trial, requests
from benchmarks.samples import Samples
from dspark_store.format.schema import StoreSchema
from dspark_store.readers.fetch import DEFAULT_OPEN_OBJECTS

TOLERANCE = 0.02
"""Rates closer than this share of the best are taken as equal: it is what measurements here can tell apart."""
SIZE_TOLERANCE = 0.005
"""Sizes closer than this share of the smallest are taken as equal."""
_OVERLAP_LOSS = 0.1
"""How much of the shorter one of reading and decoding does not hide behind the longer one: a batch begins with the
first bytes on their way and nothing to decode, and ends with the last chunks and nothing to read."""


@dataclass(frozen=True, slots=True)
class ReadCost:
    """What a setting costs a reader, measured on a few samples with all cores.

    ``work`` is seconds of reading and decoding from memory, with all objects open, and ``line`` the bytes read, both
    for a valid byte of states; ``open_seconds`` and ``open_bytes`` are those of opening one object.
    """

    work: float
    line: float
    open_seconds: float
    open_bytes: float


@dataclass(frozen=True, slots=True)
class RandomReads:
    """Random batches of ``batch_bytes`` valid bytes over ``visits`` objects, of which the share ``opened`` is not open.

    Storage gives ``storage_rate`` bytes per second; ``cores`` is the number of cores over that of the measurement.
    """

    storage_rate: float
    batch_bytes: float
    visits: float
    opened: float
    cores: float = 1.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """The rate of a setting, valid bytes per second, and the seconds a batch that storage and the cores are busy."""

    rate: float
    line_seconds: float
    work_seconds: float


def predict(cost: ReadCost, workload: RandomReads) -> Prediction:
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
    """A setting and what it comes to: rate in valid bytes per second, stored bytes per valid byte, objects a sample."""

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
class StorePlan:
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

    def workload(self, setting: Setting) -> RandomReads:
        """Return how training reads a store of a setting."""
        opened = opened_share(self.samples, setting.shard_size, self.layers)
        if self.scattered is not None:
            opened = float(self.scattered)
        visits = self.batch * self.layers / setting.layers
        return RandomReads(self.storage_rate, self.batch * self.sample_bytes, visits, opened, self.cores)


@dataclass(frozen=True, slots=True)
class Known:
    """What the search found out about one setting."""

    cost: ReadCost
    stored: float
    correction: float = 1.0

    def corrected(self, factor: float) -> Known:
        """Return the same, its rate multiplied by a factor: what a measurement gave over what was predicted."""
        return replace(self, correction=factor)


def candidates(known: Mapping[Setting, Known], plan: StorePlan) -> list[Candidate]:
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


SEARCH_SAMPLES, SHORTLIST = 24, 4
_NEAR = 0.9
"""Settings predicted within this share of the best are measured under the storage's rate before one is chosen."""


@dataclass(frozen=True, slots=True)
class OpenCost:
    """What opening an object costs: linear in the chunks that its index has room for."""

    seconds: float
    seconds_a_slot: float
    nbytes: float
    bytes_a_slot: float

    def of(self, slots: int) -> tuple[float, float]:
        """Return seconds and bytes for an object of so many slots."""
        return (
            max(0.0, self.seconds + self.seconds_a_slot * slots),
            max(0.0, self.nbytes + self.bytes_a_slot * slots),
        )

    def of_visit(self, schema: StoreSchema) -> tuple[float, float]:
        """Return seconds and bytes for one of a sample's K objects of states, with its part of the two of tokens."""
        states, tokens = self.of(schema.states.slots), self.of(schema.tokens.slots)
        part = 2 / schema.num_layers
        return states[0] + part * tokens[0], states[1] + part * tokens[1]


def measure_opening(samples: Samples, axes: Axes, place: Path, threads: int) -> OpenCost:
    """Measure the opening of objects with a small and with a large index."""
    few = samples.first(1)
    sizes = ((axes.chunk_tokens[-1], 1), (axes.chunk_tokens[0], axes.shard_sizes[-1]))
    measured = []
    for tokens, rows in sizes:
        trial = Trial(few, Setting("none", tokens, rows), place / f"open-{tokens}-{rows}", threads)
        trial.write()
        opening = trial.opening()
        slots = samples.schema("none", tokens, rows).states.slots
        measured.append((slots, opening.object_ms / 1e3, opening.object_bytes))
    (small, quick, light), (large, slow, heavy) = measured
    span = max(1, large - small)
    a_slot, bytes_a_slot = max(0.0, slow - quick) / span, (heavy - light) / span
    return OpenCost(quick - a_slot * small, a_slot, light - bytes_a_slot * small, bytes_a_slot)


class Search:
    """The settings of one layer a chunk, and what was found out about each on the first samples.

    ``rounds`` bounds how often each is read. Everything is written below ``place``.
    """

    def __init__(
        self,
        samples: Samples,
        axes: Axes,
        place: Path,
        threads: int,
        rounds: int,
        progress: Callable[[str, int, int], None] = lambda *_: None,
    ) -> None:
        self._axes = axes
        self._samples = samples.first(SEARCH_SAMPLES)
        self._rounds = rounds
        self._progress = progress
        self._trials = {
            (codec, tokens): Trial(
                self._samples,
                Setting(codec, tokens, len(self._samples.lengths)),
                place / f"{codec}-{tokens}",
                threads,
            )
            for codec in axes.codecs
            for tokens in axes.chunk_tokens
        }
        self._batches = requests("sample", self._samples, max(1, len(self._samples.lengths) // BATCH))
        self._bytes = sum(batch.wanted_bytes(self._samples) for batch in self._batches)
        for at, trial in enumerate(self._trials.values(), 1):
            trial.write()
            progress("encoding", at, len(self._trials))
        self._opening = measure_opening(self._samples, axes, place, threads)
        self.known = self._measure()

    def _measure(self) -> dict[Setting, Known]:
        times = self._times(self._trials, float("inf"))
        known = {}
        for (codec, tokens), trial in self._trials.items():
            with trial.opened("sample") as reading:
                line = reading.bytes_read(self._batches) / self._bytes
            work, stored = times[codec, tokens].median / self._bytes, trial.stored_bytes / self._samples.state_bytes
            for rows in self._axes.shard_sizes:
                schema = self._samples.schema(codec, tokens, rows)
                cost = ReadCost(work, line, *self._opening.of_visit(schema))
                known[Setting(codec, tokens, rows)] = Known(cost, stored)
        return known

    def _times(
        self, trials: Mapping[tuple[str, int], Trial], storage_rate: float, *, settle: bool = False
    ) -> dict[tuple[str, int], Spread]:
        """Time the batches of some settings from memory, behind a line of this rate."""

        def read(trial: Trial) -> float:
            with trial.opened("sample", storage_rate) as reading:
                return reading.seconds(self._batches)

        actions = {name: partial(read, trial) for name, trial in trials.items()}
        rounds = 2 * self._rounds if settle else self._rounds
        until = decided if settle else lambda _: False
        total = rounds * len(actions)
        times = time_in_turn(actions, rounds, until=until, progress=lambda done: self._progress("reading", done, total))
        return levelled(times)

    def recommend(self, plan: StorePlan) -> tuple[Candidate, Mapping[Setting, Known]]:
        """Return the setting to take for a plan, and what is known of every setting, corrected for the plan's storage.

        The best few by prediction are read once more, in turn and behind a line of the storage's rate; what that
        gives corrects their predictions. It is done again while another one is then predicted to be the best.
        """
        known, corrected = dict(self.known), set[tuple[str, int]]()
        while True:
            ranked = sorted(candidates(known, plan), key=lambda candidate: -candidate.rate)
            near = [item.setting for item in ranked if item.rate >= _NEAR * ranked[0].rate]
            names = list(dict.fromkeys((setting.codec, setting.chunk_tokens) for setting in near))[:SHORTLIST]
            if corrected.issuperset(names):
                done = {one: found for one, found in known.items() if (one.codec, one.chunk_tokens) in corrected}
                return choose(candidates(done, plan)), known
            corrected |= set(names)
            known |= self._corrected(plan, corrected)

    def _corrected(self, plan: StorePlan, names: Collection[tuple[str, int]]) -> dict[Setting, Known]:
        """Measure some codecs and T behind the plan's storage, and return their settings with what that gave."""
        times = self._times({name: self._trials[name] for name in names}, plan.storage_rate, settle=True)
        sample_bytes = self._bytes / len(self._batches) / BATCH
        here = StorePlan(1, plan.layers, sample_bytes, BATCH, plan.storage_rate, scattered=False)
        found = {}
        for setting, known in self.known.items():
            if (name := (setting.codec, setting.chunk_tokens)) in times:
                predicted = predict(known.cost, here.workload(setting)).rate
                found[setting] = known.corrected(self._bytes / times[name].median / predicted)
        return found
