"""What was measured of chunk sizes, as tables, as CSV, and as the paragraph that recommends one."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.measure import ACCESSES, Setting, default_setting
from benchmarks.recommend import SIZE_TOLERANCE, TOLERANCE, Candidate, Known, StorePlan, candidates, choose, predict
from benchmarks.samples import Samples
from benchmarks.sweep import LIMITED_ACCESSES, Measured, ReadCase, RunOff
from benchmarks.tables import Cell, Column, PeerComparison, Table
from dspark_store.format.codecs import CODEC_PRESETS

_RATE = ",.0f"
type Facet = tuple[Column, Callable[[Setting, Measured], Cell]]

_CODEC: Facet = Column("codec"), lambda setting, _: setting.codec
_STORED: Facet = Column("stored", ".3f"), lambda _, one: one.facts.stored
_OBJECTS: Facet = Column("objects", ",d"), lambda _, one: one.facts.objects
_WRITE: Facet = Column("write", _RATE), lambda _, one: one.writing.median / 1e6


def sweep_tables(measured: Mapping[Setting, Measured], samples: Samples) -> list[Table]:
    """Return the tables of a sweep: codecs and tokens per chunk, samples per shard, layers per chunk."""
    default = default_setting(samples)
    shards = {setting.shard_size for setting in measured}
    rows = default.shard_size if default.shard_size in shards else max(shards)
    tokens = {setting.chunk_tokens for setting in measured}
    middle = default.chunk_tokens if default.chunk_tokens in tokens else max(tokens)
    return [
        _codec_table({s: m for s, m in measured.items() if s.layers == 1 and s.shard_size == rows}, rows),
        _shard_table({s: m for s, m in measured.items() if s.layers == 1 and s.chunk_tokens == middle}, middle),
        _layer_table({s: m for s, m in measured.items() if (s.chunk_tokens, s.shard_size) == (middle, rows)}),
    ]


def _table(
    title: str,
    measured: Mapping[Setting, Measured],
    facets: Sequence[Facet],
    notes: Sequence[str],
    comparisons: Sequence[PeerComparison] = (),
) -> Table:
    rows = tuple(tuple(value(setting, one) for _, value in facets) for setting, one in _sorted(measured))
    return Table(title, tuple(column for column, _ in facets), rows, tuple(notes), tuple(comparisons))


def _sorted(measured: Mapping[Setting, Measured]) -> list[tuple[Setting, Measured]]:
    return sorted(measured.items(), key=lambda item: (CODEC_PRESETS.index(item[0].codec), item[0]))


def _read_cases(measured: Mapping[Setting, Measured], accesses: Sequence[str]) -> list[ReadCase]:
    found = {case for one in measured.values() for case in one.reading if case.access in accesses}
    return sorted(found, key=lambda case: (list(ACCESSES).index(case.access), -case.storage_rate))


def _rate(case: ReadCase) -> Facet:
    """Return the median of a case in MB of states per second; None where it was not measured."""
    return Column(str(case), _RATE), lambda _, one: one.reading[case].median / 1e6 if case in one.reading else None


def _read_per_wanted(access: str) -> Facet:
    return Column(f"read / wanted, {access}", ".2f"), lambda _, one: one.facts.amplification[access]


def _codec_table(measured: Mapping[Setting, Measured], rows: int) -> Table:
    facets: list[Facet] = [
        _CODEC,
        (Column("T", "d"), lambda setting, _: setting.chunk_tokens),
        _STORED,
        _WRITE,
        *map(_rate, _read_cases(measured, ("sample", "span", "sequential", "layer"))),
        _read_per_wanted("sample"),
        _read_per_wanted("span"),
    ]
    meaning = "; ".join(f"*{access}*: {text}" for access, text in ACCESSES.items() if access != "scattered")
    notes = (
        (
            "*stored*: bytes on disk, tokens included, per valid byte of states. Rates are medians in MB of valid "
            "states per second, from the page cache, or behind a line of the rate named."
        ),
        f"{meaning[0].upper()}{meaning[1:]}.",
    )
    return _table(f"Codec and tokens per chunk, {rows} samples per shard", measured, facets, notes)


def _shard_table(measured: Mapping[Setting, Measured], tokens: int) -> Table:
    facets: list[Facet] = [
        _CODEC,
        (Column("R", "d"), lambda setting, _: setting.shard_size),
        _OBJECTS,
        (Column("open the store, ms"), lambda _, one: one.facts.opening.store_ms),
        (Column("open an object, ms", ".3f"), lambda _, one: one.facts.opening.object_ms),
        (Column("KB read for it", ".1f"), lambda _, one: one.facts.opening.object_bytes / 1e3),
        _WRITE,
        *map(_rate, _read_cases(measured, LIMITED_ACCESSES)),
        _read_per_wanted("scattered"),
    ]
    notes = (f"*scattered*: {ACCESSES['scattered']}.",)
    return _table(f"Samples per shard, {tokens} tokens per chunk", measured, facets, notes)


def _layer_table(measured: Mapping[Setting, Measured]) -> Table:
    cases = _read_cases({s: m for s, m in measured.items() if s.layers > 1}, tuple(ACCESSES))
    facets: list[Facet] = [
        _CODEC,
        (Column("layers per chunk", "d"), lambda setting, _: setting.layers),
        _STORED,
        _OBJECTS,
        _WRITE,
        *map(_rate, cases),
        _read_per_wanted("layer"),
    ]
    comparisons = [
        PeerComparison(
            f"layers per chunk, {case}",
            f"{one.codec}, one layer per chunk",
            f"{other.layers} layers per chunk",
            measured[one].reading[case].median / measured[other].reading[case].median,
        )
        for other in measured
        if other.layers > 1
        for one in (replace(other, layers=1),)
        for case in cases
    ]
    notes = (
        (
            "The format keeps one layer per chunk and per object. Several are read here by the same reader, as a store "
            "of fewer and wider layers; each lands in memory as it is decoded, without a copy: (batch, layer, "
            "position, feature) for one layer per chunk, (batch, position, layer and feature) for all of them. Putting "
            "layers side by side before they are written is not counted."
        ),
    )
    setting = next(iter(measured))
    title = f"Layers per chunk, {setting.chunk_tokens} tokens per chunk, {setting.shard_size} samples per shard"
    return _table(title, measured, facets, notes, comparisons)


def run_off_table(run_offs: Sequence[RunOff], default: Setting) -> Table:
    """Return how each recommendation stands to the best setting of the sweep, and the default to that."""
    columns = (
        Column("reading"),
        Column("recommended"),
        Column("MB/s", _RATE),
        Column("best"),
        Column("its MB/s", _RATE),
        Column("recommended / best", ".3f"),
        Column("default / best", ".3f"),
        Column("predicted / measured, all settings", ".2f"),
        Column("lower quartile", ".2f"),
        Column("upper quartile", ".2f"),
    )
    body: list[tuple[Cell, ...]] = []
    comparisons = []
    for one in run_offs:
        where, best = f"chunk sizes, {one.case}", str(one.best)
        share = one.ratios[default].median / one.ratios[one.best].median if default in one.ratios else None
        rates = [one.rates[setting].median / 1e6 for setting in (one.recommended, one.best)]
        known = (one.predicted.median, one.predicted.low, one.predicted.high) if one.predicted else (None,) * 3
        body.append((str(one.case), str(one.recommended), rates[0], best, rates[1], one.share, share, *known))
        comparisons.append(PeerComparison(where, "the recommended setting", best, one.share))
        if share is not None:
            comparisons.append(PeerComparison(where, "the default", best, share))
    notes = (
        (
            f"Rates within {TOLERANCE:.0%} are taken as equal, and then the smaller store is recommended; "
            f"of sizes within {SIZE_TOLERANCE:.1%}, the one of fewer objects. *Best* is the fastest of the sweep's "
            "first three, the recommended setting and the default, all read once more in turn; ratios are medians. "
            f"The default is {default}."
        ),
    )
    return Table("The recommendation beside the best of the sweep", columns, tuple(body), notes, tuple(comparisons))


def prediction_table(known: Mapping[Setting, Known], plan: StorePlan, default: Setting) -> Table:
    """Return the best T and R of each codec, by what the search found, and the default."""
    everything = candidates(known, plan)
    shown = [
        choose([one for one in everything if one.setting.codec == codec])
        for codec in dict.fromkeys(one.setting.codec for one in everything)
    ]
    shown += [one for one in everything if one.setting == default and one not in shown]
    columns = (
        Column("codec"),
        Column("T", "d"),
        Column("R", "d"),
        Column("stored", ".3f"),
        Column("MB/s of states", _RATE),
        Column("storage busy", ".0%"),
        Column("cores busy", ".0%"),
        Column("default"),
    )
    body = []
    for one in shown:
        setting = one.setting
        workload = plan.workload(setting)
        predicted = predict(known[setting].cost, workload)
        seconds = workload.batch_bytes / one.rate
        body.append(
            (
                setting.codec,
                setting.chunk_tokens,
                setting.shard_size,
                one.stored,
                one.rate / 1e6,
                min(1.0, predicted.line_seconds / seconds),
                min(1.0, predicted.work_seconds / seconds),
                setting == default,
            )
        )
    title = f"The best of each codec, as predicted for storage of {plan.storage_rate / 1e6:,.0f} MB/s"
    return Table(title, columns, tuple(body))


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
        beside = (
            f" Uncompressed it would be {other.stored / chosen.stored:.2f} times as large and read at "
            f"{other.rate / 1e6:,.0f} MB/s."
        )
    opened = f"{workload.opened:.0%} of the objects that a batch visits are opened anew" if workload.opened else ""
    shards = f"Shards of {setting.shard_size} samples" + (f": {opened}, " if opened else ": all objects stay open, ")
    origin = " (measured here)" if measured else ""
    return (
        f"Take codec {setting.codec}, {setting.chunk_tokens} tokens per chunk and {setting.shard_size} samples per "
        f"shard. From storage of {plan.storage_rate / 1e6:,.0f} MB/s{origin} with {cores} "
        f"cores, training reads {chosen.rate / 1e6:,.0f} MB of states per second, bound by {bound}, and a byte of "
        f"states takes {chosen.stored:.3f} bytes on disk.{beside} {shards}and {plan.samples:,} samples are "
        f"{chosen.objects * plan.samples:,.0f} objects of states. Of settings within {TOLERANCE:.0%} of the fastest, "
        f"this is the smallest store.\n\n    {setting.flags}"
    )


def write_csv(path: Path, measured: Mapping[Setting, Measured]) -> None:
    """Write everything that was measured, a row for each setting; rates are bytes of valid states per second."""
    cases = _read_cases(measured, tuple(ACCESSES))
    rows: list[dict[str, Cell]] = []
    for setting, one in _sorted(measured):
        facts, opening = one.facts, one.facts.opening
        row: dict[str, Cell] = {
            "codec": setting.codec,
            "chunk_tokens": setting.chunk_tokens,
            "shard_size": setting.shard_size,
            "layers_per_chunk": setting.layers,
            "stored_per_byte": facts.stored,
            "objects": facts.objects,
            **{f"open_{name}": value for name, value in asdict(opening).items()},
            **{f"read_per_wanted_{access}": facts.amplification[access] for access in ACCESSES},
        }
        rates = {"write": one.writing, **{f"read {case}": one.reading.get(case) for case in cases}}
        for name, found in rates.items():
            field = name.replace(" ", "_").replace("/", "_per_")
            for part in ("low", "median", "high"):
                row[f"{field}_{part}"] = None if found is None else getattr(found, part)
        rows.append(row)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
