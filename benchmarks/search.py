"""The cheap search: each codec and T encoded and decoded on a few samples, the rest is reckoned."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.access import BATCH, requests
from benchmarks.costs import Spread, decided, levelled, time_in_turn
from benchmarks.recommend import Candidate, Cost, Known, Plan, candidates, choose, predict
from benchmarks.samples import Samples
from benchmarks.setting import Axes, Setting
from benchmarks.trial import Trial
from dspark_store.format.schema import StoreSchema

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
        progress: Callable[[str], None] = lambda _: None,
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
            progress(f"encoding {at} of {len(self._trials)} samples of settings")
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
                cost = Cost(work, line, *self._opening.of_visit(schema))
                known[Setting(codec, tokens, rows)] = Known(cost, stored)
        return known

    def _times(
        self, trials: Mapping[tuple[str, int], Trial], storage_rate: float, *, settle: bool = False
    ) -> dict[tuple[str, int], Spread]:
        """Time the batches of some settings from memory, behind a line of this rate."""

        def read(trial: Trial) -> float:
            with trial.opened("sample", storage_rate) as reading:
                return reading.seconds(self._batches)

        self._progress(f"reading {len(trials)} settings")
        actions = {name: partial(read, trial) for name, trial in trials.items()}
        rounds = 2 * self._rounds if settle else self._rounds
        return levelled(time_in_turn(actions, rounds, until=decided if settle else lambda _: False))

    def recommend(self, plan: Plan) -> tuple[Candidate, Mapping[Setting, Known]]:
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

    def _corrected(self, plan: Plan, names: Collection[tuple[str, int]]) -> dict[Setting, Known]:
        """Measure some codecs and T behind the plan's storage, and return their settings with what that gave."""
        times = self._times({name: self._trials[name] for name in names}, plan.storage_rate, settle=True)
        sample_bytes = self._bytes / len(self._batches) / BATCH
        here = Plan(1, plan.layers, sample_bytes, BATCH, plan.storage_rate, scattered=False)
        found = {}
        for setting, known in self.known.items():
            if (name := (setting.codec, setting.chunk_tokens)) in times:
                predicted = predict(known.cost, here.workload(setting)).rate
                found[setting] = known.corrected(self._bytes / times[name].median / predicted)
        return found
