"""The full sweep: every setting written, and read in every way; and how far the recommendation is from the best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.costs import Spread, decided, levelled, spread, time_in_turn
from benchmarks.measure import ACCESSES, BATCH, Axes, Opening, Setting, Trial, default_setting, requests
from benchmarks.recommend import Search, StorePlan, candidates
from benchmarks.samples import Samples

UNLIMITED = float("inf")
LIMITED_ACCESSES = ("sample", "scattered")
RIVALS = 3


@dataclass(frozen=True, slots=True, order=True)
class ReadCase:
    """An access pattern, and the rate in bytes per second of the storage that it reads from."""

    access: str
    storage_rate: float = UNLIMITED

    def __str__(self) -> str:
        return self.access if self.storage_rate == UNLIMITED else f"{self.access} at {self.storage_rate / 1e6:.0f} MB/s"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a setting takes: stored bytes per valid byte of states, objects, opening, bytes read per byte wanted."""

    stored: float
    objects: int
    opening: Opening
    amplification: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Measured:
    """A setting's facts, and its rates in valid bytes of states per second: of writing, and of reading by case."""

    facts: Facts
    writing: Spread
    reading: Mapping[ReadCase, Spread]


@dataclass(frozen=True, slots=True)
class RunOff:
    """The recommended setting against the best of the sweep and the default, measured once more in turn.

    ``ratios`` are rates over that of the recommended one, by setting; ``best`` is the greatest, which may be 1.
    ``predicted`` spreads, over all settings of the sweep, what was predicted over what was measured.
    """

    case: ReadCase
    recommended: Setting
    rates: Mapping[Setting, Spread]
    ratios: Mapping[Setting, Spread]
    predicted: Spread | None = None

    @property
    def best(self) -> Setting:
        """The fastest setting of the run-off."""
        return max(self.ratios, key=lambda setting: self.ratios[setting].median)

    @property
    def share(self) -> float:
        """The recommended setting's rate over that of the best."""
        return 1 / self.ratios[self.best].median


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: batches a reading, rounds of writing and of reading, and seconds a part of the sweep."""

    batches: int = 3
    write_rounds: int = 3
    read_rounds: int = 7
    seconds: float = 600.0


class Sweep:
    """All settings of some axes, written below ``place``. Steps are told to ``progress``: what, done, of how many."""

    def __init__(
        self,
        samples: Samples,
        axes: Axes,
        place: Path,
        threads: int,
        effort: Effort,
        progress: Callable[[str, int, int], None] = lambda *_: None,
    ) -> None:
        self.samples = samples
        self._effort = effort
        self._progress = progress
        grouped = {layers: samples.grouped(layers) if layers > 1 else samples for layers in axes.layers}
        self.trials = {
            setting: Trial(grouped[setting.layers], setting, place / str(number), threads)
            for number, setting in enumerate(axes.settings())
        }
        self._requests = {access: requests(access, samples, effort.batches) for access in ACCESSES}

    def run(self, storage_rates: Sequence[float]) -> dict[Setting, Measured]:
        """Write and read everything; return what was measured, by setting.

        Behind a line of each of the ``storage_rates``, settings of one layer a chunk are read in training's two ways.
        """
        writing = self._in_turn("writing", {name: trial.write for name, trial in self.trials.items()})
        facts = self._facts()
        cases = {(setting, ReadCase(access)) for setting in self.trials for access in ACCESSES}
        times = self._reads("reading", cases)
        for rate in storage_rates:
            case = [ReadCase(access, rate) for access in LIMITED_ACCESSES]
            limited = {(setting, one) for setting in self.trials if setting.layers == 1 for one in case}
            times |= self._reads(f"reading at {rate / 1e6:.0f} MB/s", limited)
        read: dict[Setting, dict[ReadCase, Spread]] = {setting: {} for setting in self.trials}
        for (setting, one), seconds in sorted(times.items(), key=lambda item: item[0]):
            read[setting][one] = seconds.rates(self._wanted_bytes(one.access))
        nbytes = self.samples.state_bytes
        return {
            setting: Measured(facts[setting], writing[setting].rates(nbytes), read[setting]) for setting in self.trials
        }

    def run_off(self, case: ReadCase, recommended: Setting, others: Sequence[Setting], rounds: int) -> RunOff:
        """Measure a recommended setting and some others in turn, until the comparison is decided."""
        names = list(dict.fromkeys((recommended, *others)))
        actions = {name: partial(self._read, name, case) for name in names}
        times = time_in_turn(actions, rounds, seconds=self._effort.seconds, until=decided)
        wanted = self._wanted_bytes(case.access)
        ratios = {
            name: spread([ours / theirs for ours, theirs in zip(times[recommended], times[name], strict=True)])
            for name in names
        }
        rates = {name: seconds.rates(wanted) for name, seconds in levelled(times).items()}
        return RunOff(case, recommended, rates, ratios)

    def judged(self, search: Search, measured: Mapping[Setting, Measured], case: ReadCase) -> RunOff:
        """Measure what the search recommends for a case beside the best of the sweep and the default."""
        plan = StorePlan(
            len(self.samples.lengths),
            self.samples.layers,
            self.samples.state_bytes / len(self.samples.lengths),
            BATCH,
            case.storage_rate,
            scattered=case.access == "scattered",
        )
        recommended = search.recommend(plan)[0].setting
        default = default_setting(self.samples)
        others = [*rivals(measured, case), *([default] if default in measured else [])]
        found = self.run_off(case, recommended, others, 3 * self._effort.read_rounds)
        errors = [one.rate / measured[one.setting].reading[case].median for one in candidates(search.known, plan)]
        return replace(found, predicted=spread(errors))

    def _wanted_bytes(self, access: str) -> int:
        return sum(request.wanted_bytes(self.samples) for request in self._requests[access])

    def _facts(self) -> dict[Setting, Facts]:
        found = {}
        for done, (setting, trial) in enumerate(self.trials.items(), 1):
            amplification = {}
            for access in ACCESSES:
                with trial.opened(access) as reading:
                    nbytes = reading.bytes_read(self._requests[access])
                amplification[access] = nbytes / self._wanted_bytes(access)
            stored = trial.stored_bytes / self.samples.state_bytes
            found[setting] = Facts(stored, trial.objects, trial.opening(), amplification)
            self._progress("counting bytes", done, len(self.trials))
        return found

    def _reads(self, what: str, cases: set[tuple[Setting, ReadCase]]) -> dict[tuple[Setting, ReadCase], Spread]:
        """Time the batches of every case."""
        actions = {(setting, case): partial(self._read, setting, case) for setting, case in sorted(cases)}
        return self._in_turn(what, actions)

    def _read(self, setting: Setting, case: ReadCase) -> float:
        with self.trials[setting].opened(case.access, case.storage_rate) as reading:
            return reading.seconds(self._requests[case.access])

    def _in_turn[Name](self, what: str, actions: Mapping[Name, Callable[[], float]]) -> dict[Name, Spread]:
        rounds = self._effort.write_rounds if what == "writing" else self._effort.read_rounds
        return levelled(
            time_in_turn(
                actions,
                rounds,
                seconds=self._effort.seconds,
                progress=lambda done: self._progress(what, done, rounds * len(actions)),
            )
        )


def rivals(measured: Mapping[Setting, Measured], case: ReadCase, count: int = RIVALS) -> list[Setting]:
    """Return the fastest settings of a case, of those that the format can keep: one layer a chunk."""
    able = [setting for setting in measured if setting.layers == 1]
    return sorted(able, key=lambda setting: -measured[setting].reading[case].median)[:count]
