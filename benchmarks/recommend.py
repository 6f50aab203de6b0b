"""From a few encoded and decoded samples to what each setting gives in training, and to the one that is best there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.costs import Spread, decided, levelled, time_in_turn
from benchmarks.measure import BATCH, Axes, Setting, Trial, requests
from benchmarks.samples import Samples
from benchmarks.tables import Cell, Column, Table
from dspark_store.format.schema import StoreSchema
from dspark_store.format.sizes import ratio_text
from dspark_store.readers.ranges import DEFAULT_OPEN_OBJECTS

TOLERANCE = 0.02
"""Rates closer than this share of the best are taken as equal: it is what measurements here can tell apart."""
SIZE_TOLERANCE = 0.005
"""Sizes closer than this share of the smallest are taken as equal."""
SEARCH_SAMPLES, SHORTLIST = 24, 4
_NEAR = 0.9
"""Settings predicted within this share of the best are measured under the storage's rate before one is chosen."""
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
    """The rate of a setting, valid bytes per second, and the seconds per batch that storage and the cores are busy."""

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
    return max(0.0, 1 - open_objects / (-(-samples // shard_size) * layers))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setting, its rate in valid bytes per second, what it stores of ragged bf16 rows, and its objects per sample."""

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
    """The store that is planned, and where it is read: samples, K, mean valid bytes per sample, storage, cores.

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
    """What the search found out about one setting; ``correction`` is a measured rate over the predicted one."""

    cost: ReadCost
    stored: float
    correction: float = 1.0

    def candidate(self, setting: Setting, plan: StorePlan) -> Candidate:
        """Return the setting with its predicted rate."""
        rate = predict(self.cost, plan.workload(setting)).rate * self.correction
        return Candidate(
            setting, rate, self.stored, -(-plan.samples // setting.shard_size) * plan.layers / plan.samples
        )


def candidates(known: Mapping[Setting, Known], plan: StorePlan) -> list[Candidate]:
    """Return every setting with its predicted rate."""
    return [found.candidate(setting, plan) for setting, found in known.items()]


def measure_opening(
    samples: Samples, axes: Axes, place: Path, threads: int
) -> Callable[[StoreSchema], tuple[float, float]]:
    """Measure opening an object with a small and with a large index; what lies between costs what lies between.

    Return seconds and bytes, by schema, of one of a sample's K objects of states with its part of the two of tokens.
    """
    slots: list[int] = []
    costs: tuple[list[float], list[float]] = ([], [])
    for tokens, rows in ((axes.chunk_tokens[-1], 1), (axes.chunk_tokens[0], axes.shard_sizes[-1])):
        trial = Trial(samples.first(1), Setting("none", tokens, rows), place / f"open-{tokens}-{rows}", threads)
        trial.write()
        opening = trial.opening()
        slots.append(samples.schema("none", tokens, rows).states.slots)
        costs[0].append(opening.object_ms / 1e3)
        costs[1].append(opening.object_bytes)

    def of_visit(schema: StoreSchema) -> tuple[float, float]:
        parts = ((schema.states.slots, 1.0), (schema.tokens.slots, 2 / schema.num_layers))
        seconds, nbytes = (sum(share * float(np.interp(at, slots, cost)) for at, share in parts) for cost in costs)
        return seconds, nbytes

    return of_visit


class Search:
    """The settings of one layer per chunk, and what was found out about each on the first samples.

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
        self._samples = samples.first(SEARCH_SAMPLES)
        self._rounds = rounds
        self._progress = progress
        rows = len(self._samples.lengths)
        names = [(codec, tokens) for codec in axes.codecs for tokens in axes.chunk_tokens]
        self._trials = {
            name: Trial(self._samples, Setting(*name, rows), place / "-".join(map(str, name)), threads)
            for name in names
        }
        self._batches = requests("sample", self._samples, max(1, rows // BATCH))
        self._bytes = sum(batch.wanted_bytes(self._samples) for batch in self._batches)
        for at, trial in enumerate(self._trials.values(), 1):
            trial.write()
            progress("encoding", at, len(self._trials))
        self.known = self._measure(axes.shard_sizes, measure_opening(self._samples, axes, place, threads))

    def _measure(
        self, shard_sizes: Sequence[int], opening: Callable[[StoreSchema], tuple[float, float]]
    ) -> dict[Setting, Known]:
        times = self._times(self._trials, float("inf"))
        known = {}
        for name, trial in self._trials.items():
            with trial.opened("sample") as reading:
                line = reading.bytes_read(self._batches) / self._bytes
            work, stored = times[name].median / self._bytes, sum(trial.files.values()) / self._samples.ragged_bytes
            for rows in shard_sizes:
                cost = ReadCost(work, line, *opening(self._samples.schema(*name, rows)))
                known[Setting(*name, rows)] = Known(cost, stored)
        return known

    def _times(
        self, names: Collection[tuple[str, int]], storage_rate: float, *, settle: bool = False
    ) -> dict[tuple[str, int], Spread]:
        """Time the batches of some settings from memory, behind a line of this rate."""

        def read(name: tuple[str, int]) -> float:
            with self._trials[name].opened("sample", storage_rate) as reading:
                return reading.seconds(self._batches)

        rounds = 2 * self._rounds if settle else self._rounds
        until = decided if settle else lambda _: False
        report = partial(self._progress, "reading")
        return levelled(
            time_in_turn({name: partial(read, name) for name in names}, rounds, until=until, progress=report)
        )

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
        times = self._times(names, plan.storage_rate, settle=True)
        sample_bytes = self._bytes / len(self._batches) / BATCH
        here = StorePlan(1, plan.layers, sample_bytes, BATCH, plan.storage_rate, scattered=False)
        found = {}
        for setting, known in self.known.items():
            if (name := (setting.codec, setting.chunk_tokens)) in times:
                predicted = predict(known.cost, here.workload(setting)).rate
                found[setting] = replace(known, correction=self._bytes / times[name].median / predicted)
        return found


def prediction_table(known: Mapping[Setting, Known], plan: StorePlan, default: Setting) -> Table:
    """Return the best T and R of each codec, by what the search found, and the default."""
    everything = candidates(known, plan)
    codecs = dict.fromkeys(setting.codec for setting in known)
    shown = [choose([one for one in everything if one.setting.codec == codec]) for codec in codecs]
    shown += [one for one in everything if one.setting == default and one not in shown]
    rows: list[tuple[Cell, ...]] = []
    for one in shown:
        setting, workload = one.setting, plan.workload(one.setting)
        predicted, seconds = predict(known[setting].cost, workload), workload.batch_bytes / one.rate
        busy = [min(1.0, part / seconds) for part in (predicted.line_seconds, predicted.work_seconds)]
        axes = (setting.codec, setting.chunk_tokens, setting.shard_size)
        rows.append((*axes, one.stored, one.rate / 1e6, *busy, setting == default))
    title = f"The best of each codec, as predicted for storage of {plan.storage_rate / 1e6:,.0f} MB/s"
    columns = (Column("codec"), Column("T", "d"), Column("R", "d"), Column("stored", ".3f"))
    rates = (Column("MB/s of states", ",.0f"), Column("storage busy", ".0%"), Column("cores busy", ".0%"))
    return Table(title, (*columns, *rates, Column("default")), tuple(rows))


def recommendation(
    chosen: Candidate, known: Mapping[Setting, Known], plan: StorePlan, cores: int, *, measured: bool
) -> str:
    """Return what to take and why, and the flags of the precompute."""
    setting, workload = chosen.setting, plan.workload(chosen.setting)
    predicted = predict(known[setting].cost, workload)
    bound = "storage" if predicted.line_seconds > predicted.work_seconds else "decoding"
    plain = [one for one in candidates(known, plan) if one.setting.codec == "none"]
    beside = ""
    if plain and setting.codec != "none":
        other = choose(plain)
        size, rate = ratio_text(other.stored, plan.layers + 1), other.rate / 1e6
        beside = f" Uncompressed it would be {size} and read at {rate:,.0f} MB/s."
    opened = "all objects stay open"
    if workload.opened:
        opened = f"{workload.opened:.0%} of the objects that a batch visits are opened anew"
    origin = " (measured here)" if measured else ""
    return (
        f"Take codec {setting.codec}, {setting.chunk_tokens} tokens per chunk and {setting.shard_size} samples per "
        f"shard. From storage of {plan.storage_rate / 1e6:,.0f} MB/s{origin} with {cores} "
        f"cores, training reads {chosen.rate / 1e6:,.0f} MB of states per second, bound by {bound}, and the store "
        f"is {ratio_text(chosen.stored, plan.layers + 1)}.{beside} Shards of {setting.shard_size} samples: {opened}, "
        f"and {plan.samples:,} samples are {chosen.objects * plan.samples:,.0f} objects of states. Of settings within "
        f"{TOLERANCE:.0%} of the fastest, this is the smallest store.\n\n    {setting.flags}"
    )
