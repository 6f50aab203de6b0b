"""The full sweep: every setting written, and read in every way; and how far the recommendation is from the best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.costs import Spread, decided, levelled, spread, time_in_turn
from benchmarks.measure import ACCESSES, BATCH, Axes, Opening, Setting, Trial, default_setting, requests
from benchmarks.recommend import SIZE_TOLERANCE, TOLERANCE, Search, StorePlan, candidates
from benchmarks.samples import Samples
from benchmarks.tables import Cell, Column, PeerComparison, Table
from dspark_store.format.codecs import CODEC_PRESETS

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
    """What a setting takes: stored bytes of ragged bf16 rows, objects, opening, bytes read per byte wanted."""

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

    def share(self, setting: Setting) -> float | None:
        """The rate of a setting over that of the best; None where it was not measured."""
        return self.ratios[setting].median / self.ratios[self.best].median if setting in self.ratios else None


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: batches a reading, rounds of writing and of reading, and seconds a part of the sweep."""

    batches: int = 3
    write_rounds: int = 3
    read_rounds: int = 7
    seconds: float = 600.0


class Sweep:
    """All settings of some axes, written below ``place``; ``progress`` gets a step, what is done, of how much."""

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
        self._wanted = {
            access: sum(request.wanted_bytes(samples) for request in wanted)
            for access, wanted in self._requests.items()
        }

    def run(self, storage_rates: Sequence[float]) -> dict[Setting, Measured]:
        """Write and read everything; return what was measured, by setting.

        Behind a line of each of the ``storage_rates``, settings of one layer per chunk are read in training's two ways.
        """
        writing = self._in_turn("writing", {name: trial.write for name, trial in self.trials.items()})
        facts = {setting: self._facts(trial, done) for done, (setting, trial) in enumerate(self.trials.items(), 1)}
        times = self._reads("reading", {(setting, ReadCase(access)) for setting in self.trials for access in ACCESSES})
        for rate in storage_rates:
            limited = {
                (setting, ReadCase(access, rate))
                for setting in self.trials
                for access in LIMITED_ACCESSES
                if setting.layers == 1
            }
            times |= self._reads(f"reading at {rate / 1e6:.0f} MB/s", limited)
        read: dict[Setting, dict[ReadCase, Spread]] = {setting: {} for setting in self.trials}
        for (setting, case), seconds in sorted(times.items(), key=lambda item: item[0]):
            read[setting][case] = seconds.rates(self._wanted[case.access])
        nbytes = self.samples.state_bytes
        return {
            setting: Measured(facts[setting], writing[setting].rates(nbytes), read[setting]) for setting in self.trials
        }

    def run_off(self, case: ReadCase, recommended: Setting, others: Sequence[Setting], rounds: int) -> RunOff:
        """Measure a recommended setting and some others in turn, until the comparison is decided."""
        actions = {name: partial(self._read, name, case) for name in dict.fromkeys((recommended, *others))}
        times = time_in_turn(actions, rounds, seconds=self._effort.seconds, until=decided)
        ratios = {
            name: spread([ours / theirs for ours, theirs in zip(times[recommended], seconds, strict=True)])
            for name, seconds in times.items()
        }
        rates = {name: seconds.rates(self._wanted[case.access]) for name, seconds in levelled(times).items()}
        return RunOff(case, recommended, rates, ratios)

    def judged(self, search: Search, measured: Mapping[Setting, Measured], case: ReadCase) -> RunOff:
        """Measure what the search recommends for a case beside the best of the sweep and the default."""
        count, nbytes = len(self.samples.lengths), self.samples.state_bytes
        scattered = case.access == "scattered"
        plan = StorePlan(count, self.samples.layers, nbytes / count, BATCH, case.storage_rate, scattered=scattered)
        recommended = search.recommend(plan)[0].setting
        default = default_setting(self.samples)
        others = [*rivals(measured, case), *([default] if default in measured else [])]
        found = self.run_off(case, recommended, others, 3 * self._effort.read_rounds)
        errors = [one.rate / measured[one.setting].reading[case].median for one in candidates(search.known, plan)]
        return replace(found, predicted=spread(errors))

    def _facts(self, trial: Trial, done: int) -> Facts:
        amplification = {}
        for access, wanted in self._requests.items():
            with trial.opened(access) as reading:
                amplification[access] = reading.bytes_read(wanted) / self._wanted[access]
        self._progress("counting bytes", done, len(self.trials))
        files = trial.files
        return Facts(sum(files.values()) / self.samples.ragged_bytes, len(files), trial.opening(), amplification)

    def _reads(self, what: str, cases: set[tuple[Setting, ReadCase]]) -> dict[tuple[Setting, ReadCase], Spread]:
        """Time the batches of every case."""
        return self._in_turn(what, {case: partial(self._read, *case) for case in sorted(cases)})

    def _read(self, setting: Setting, case: ReadCase) -> float:
        with self.trials[setting].opened(case.access, case.storage_rate) as reading:
            return reading.seconds(self._requests[case.access])

    def _in_turn[Name](self, what: str, actions: Mapping[Name, Callable[[], float]]) -> dict[Name, Spread]:
        rounds = self._effort.write_rounds if what == "writing" else self._effort.read_rounds
        report = partial(self._progress, what)
        return levelled(time_in_turn(actions, rounds, seconds=self._effort.seconds, progress=report))


def rivals(measured: Mapping[Setting, Measured], case: ReadCase, count: int = RIVALS) -> list[Setting]:
    """Return the fastest settings of a case, of those that the format can keep: one layer per chunk."""
    able = [setting for setting in measured if setting.layers == 1]
    return sorted(able, key=lambda setting: -measured[setting].reading[case].median)[:count]


type Facet = tuple[Column, Callable[[Setting, Measured], Cell]]
_CODEC: Facet = Column("codec"), lambda setting, _: setting.codec
_STORED: Facet = Column("stored", ".3f"), lambda _, one: one.facts.stored
_OBJECTS: Facet = Column("objects", ",d"), lambda _, one: one.facts.objects
_WRITE: Facet = Column("write", ",.0f"), lambda _, one: one.writing.median / 1e6


def sweep_tables(measured: Mapping[Setting, Measured], samples: Samples) -> list[Table]:
    """Return the tables of a sweep: codecs and tokens per chunk, samples per shard, layers per chunk."""
    default = default_setting(samples)
    shards, tokens = ({getattr(one, axis) for one in measured} for axis in ("shard_size", "chunk_tokens"))
    rows = default.shard_size if default.shard_size in shards else max(shards)
    middle = default.chunk_tokens if default.chunk_tokens in tokens else max(tokens)
    return [
        _codec_table({s: m for s, m in measured.items() if s.layers == 1 and s.shard_size == rows}, rows),
        _shard_table({s: m for s, m in measured.items() if s.layers == 1 and s.chunk_tokens == middle}, middle),
        _layer_table({s: m for s, m in measured.items() if (s.chunk_tokens, s.shard_size) == (middle, rows)}),
    ]


def _table(title: str, measured: Mapping[Setting, Measured], facets: Sequence[Facet], *notes: str) -> Table:
    rows = tuple(tuple(value(setting, one) for _, value in facets) for setting, one in in_order(measured))
    return Table(title, tuple(column for column, _ in facets), rows, notes)


def in_order(measured: Mapping[Setting, Measured]) -> list[tuple[Setting, Measured]]:
    """Return what was measured, codecs in the order of the presets."""
    return sorted(measured.items(), key=lambda item: (CODEC_PRESETS.index(item[0].codec), item[0]))


def read_cases(measured: Mapping[Setting, Measured], accesses: Iterable[str]) -> list[ReadCase]:
    """Return the cases that were read of some access patterns, by pattern and storage rate, the fastest first."""
    found = {case for one in measured.values() for case in one.reading if case.access in accesses}
    return sorted(found, key=lambda case: (list(ACCESSES).index(case.access), -case.storage_rate))


def _rates(measured: Mapping[Setting, Measured], *accesses: str) -> list[Facet]:
    """Return the median of each case in MB of states per second; None where it was not measured."""

    def facet(case: ReadCase) -> Facet:
        column = Column(str(case), ",.0f")
        return column, lambda _, one: one.reading[case].median / 1e6 if case in one.reading else None

    return [facet(case) for case in read_cases(measured, accesses)]


def _read_per_wanted(access: str) -> Facet:
    return Column(f"read / wanted, {access}", ".2f"), lambda _, one: one.facts.amplification[access]


def _codec_table(measured: Mapping[Setting, Measured], rows: int) -> Table:
    tokens: Facet = Column("T", "d"), lambda setting, _: setting.chunk_tokens
    rates = _rates(measured, "sample", "span", "sequential", "layer")
    facets = [_CODEC, tokens, _STORED, _WRITE, *rates, _read_per_wanted("sample"), _read_per_wanted("span")]
    meaning = "; ".join(f"*{access}*: {text}" for access, text in ACCESSES.items() if access != "scattered")
    return _table(
        f"Codec and tokens per chunk, {rows} samples per shard",
        measured,
        facets,
        "*stored*: bytes on disk, tokens included, of ragged bf16 rows of K+1 vectors. Rates are medians in MB of "
        "valid states per second, from the page cache, or behind a line of the rate named.",
        f"{meaning[0].upper()}{meaning[1:]}.",
    )


def _shard_table(measured: Mapping[Setting, Measured], tokens: int) -> Table:
    facets: list[Facet] = [
        _CODEC,
        (Column("R", "d"), lambda setting, _: setting.shard_size),
        _OBJECTS,
        (Column("open the store, ms"), lambda _, one: one.facts.opening.store_ms),
        (Column("open an object, ms", ".3f"), lambda _, one: one.facts.opening.object_ms),
        (Column("KB read for it", ".1f"), lambda _, one: one.facts.opening.object_bytes / 1e3),
        _WRITE,
        *_rates(measured, *LIMITED_ACCESSES),
        _read_per_wanted("scattered"),
    ]
    note = f"*scattered*: {ACCESSES['scattered']}."
    return _table(f"Samples per shard, {tokens} tokens per chunk", measured, facets, note)


def _layer_table(measured: Mapping[Setting, Measured]) -> Table:
    several = {s: m for s, m in measured.items() if s.layers > 1}
    layers: Facet = Column("layers per chunk", "d"), lambda setting, _: setting.layers
    facets = [_CODEC, layers, _STORED, _OBJECTS, _WRITE, *_rates(several, *ACCESSES), _read_per_wanted("layer")]
    comparisons = tuple(
        PeerComparison(
            f"layers per chunk, {case}",
            f"{setting.codec}, one layer per chunk",
            f"{setting.layers} layers per chunk",
            measured[replace(setting, layers=1)].reading[case].median / other.reading[case].median,
        )
        for setting, other in several.items()
        for case in read_cases(several, ACCESSES)
    )
    setting = next(iter(measured))
    table = _table(
        f"Layers per chunk, {setting.chunk_tokens} tokens per chunk, {setting.shard_size} samples per shard",
        measured,
        facets,
        "The format keeps one layer per chunk and per object. Several are read here by the same reader, as a store "
        "of fewer and wider layers; each lands in memory as it is decoded, without a copy: (batch, layer, position, "
        "feature) for one layer per chunk, (batch, position, layer and feature) for all of them. Putting layers side "
        "by side before they are written is not counted.",
    )
    return replace(table, comparisons=comparisons)


def run_off_table(run_offs: Sequence[RunOff], default: Setting) -> Table:
    """Return how each recommendation stands to the best setting of the sweep, and the default to that."""
    rows: list[tuple[Cell, ...]] = []
    comparisons = []
    for one in run_offs:
        best, shares = str(one.best), (one.share(one.recommended), one.share(default))
        ours, theirs = (one.rates[setting].median / 1e6 for setting in (one.recommended, one.best))
        known = (one.predicted.median, one.predicted.low, one.predicted.high) if one.predicted else (None,) * 3
        rows.append((str(one.case), str(one.recommended), ours, best, theirs, *shares, *known))
        comparisons += [
            PeerComparison(f"chunk sizes, {one.case}", name, best, share)
            for name, share in zip(("the recommended setting", "the default"), shares, strict=True)
            if share is not None
        ]
    columns = (Column("reading"), Column("recommended"), Column("MB/s", ",.0f"), Column("best"))
    ratios = (Column("its MB/s", ",.0f"), Column("recommended / best", ".3f"), Column("default / best", ".3f"))
    predicted = (Column("predicted / measured, all settings"), Column("lower quartile"), Column("upper quartile"))
    note = (
        f"Rates within {TOLERANCE:.0%} are taken as equal, and then the smaller store is recommended; "
        f"of sizes within {SIZE_TOLERANCE:.1%}, the one of fewer objects. *Best* is the fastest of the sweep's "
        "first three, the recommended setting and the default, all read once more in turn; ratios are medians. "
        f"The default is {default}."
    )
    title = "The recommendation beside the best of the sweep"
    return Table(title, (*columns, *ratios, *predicted), tuple(rows), (note,), tuple(comparisons))
