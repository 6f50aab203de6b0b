"""What was measured of chunk sizes, as tables, as CSV, and as the paragraph that recommends one."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.access import ACCESSES
from benchmarks.recommend import SIZE_TOLERANCE, TOLERANCE, Candidate, Known, Plan, candidates, choose, predict
from benchmarks.samples import Samples
from benchmarks.setting import Setting, default_setting
from benchmarks.sweep import LIMITED_ACCESSES, Measured, ReadCase, RunOff
from benchmarks.tables import Cell, Column, Comparison, Table
from dspark_store.format.codecs import CODEC_PRESETS

_RATE = ",.0f"


def sweep_tables(measured: Mapping[Setting, Measured], samples: Samples) -> list[Table]:
    """Return the tables of a sweep: codecs and tokens a chunk, samples a shard, layers a chunk."""
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


def _sorted(measured: Mapping[Setting, Measured]) -> list[tuple[Setting, Measured]]:
    return sorted(
        measured.items(),
        key=lambda item: (
            CODEC_PRESETS.index(item[0].codec),
            item[0].chunk_tokens,
            item[0].shard_size,
            item[0].layers,
        ),
    )


def _read_cases(measured: Mapping[Setting, Measured], accesses: Sequence[str]) -> list[ReadCase]:
    found = {case for one in measured.values() for case in one.reading if case.access in accesses}
    return sorted(found, key=lambda case: (list(ACCESSES).index(case.access), -case.storage_rate))


def _rates(one: Measured, cases: Sequence[ReadCase]) -> Iterator[Cell]:
    """Yield the median of each case in MB of states a second; None where it was not measured."""
    for case in cases:
        yield one.reading[case].median / 1e6 if case in one.reading else None


def _codec_table(measured: Mapping[Setting, Measured], rows: int) -> Table:
    cases = _read_cases(measured, ("sample", "span", "sequential", "layer"))
    columns = (
        Column("codec"),
        Column("T", "d"),
        Column("stored", ".3f"),
        Column("write", _RATE),
        *(Column(str(case), _RATE) for case in cases),
        Column("read / wanted, sample", ".2f"),
        Column("read / wanted, span", ".2f"),
    )
    body = tuple(
        (
            setting.codec,
            setting.chunk_tokens,
            one.facts.stored,
            one.writing.median / 1e6,
            *_rates(one, cases),
            one.facts.amplification["sample"],
            one.facts.amplification["span"],
        )
        for setting, one in _sorted(measured)
    )
    meaning = "; ".join(f"*{access}*: {text}" for access, text in ACCESSES.items() if access != "scattered")
    notes = (
        (
            "*stored*: bytes on disk, tokens included, a valid byte of states. Rates are medians in MB of valid states "
            "a second, from the page cache, or behind a line of the rate named."
        ),
        f"{meaning[0].upper()}{meaning[1:]}.",
    )
    return Table(f"Codec and tokens a chunk, {rows} samples a shard", columns, body, notes)


def _shard_table(measured: Mapping[Setting, Measured], tokens: int) -> Table:
    cases = _read_cases(measured, LIMITED_ACCESSES)
    columns = (
        Column("codec"),
        Column("R", "d"),
        Column("objects", ",d"),
        Column("open the store, ms"),
        Column("open an object, ms", ".3f"),
        Column("KB read for it", ".1f"),
        Column("write", _RATE),
        *(Column(str(case), _RATE) for case in cases),
        Column("read / wanted, scattered", ".2f"),
    )
    body = tuple(
        (
            setting.codec,
            setting.shard_size,
            one.facts.objects,
            one.facts.opening.store_ms,
            one.facts.opening.object_ms,
            one.facts.opening.object_bytes / 1e3,
            one.writing.median / 1e6,
            *_rates(one, cases),
            one.facts.amplification["scattered"],
        )
        for setting, one in _sorted(measured)
    )
    notes = (f"*scattered*: {ACCESSES['scattered']}.",)
    return Table(f"Samples a shard, {tokens} tokens a chunk", columns, body, notes)


def _layer_table(measured: Mapping[Setting, Measured]) -> Table:
    cases = _read_cases({s: m for s, m in measured.items() if s.layers > 1}, tuple(ACCESSES))
    columns = (
        Column("codec"),
        Column("layers a chunk", "d"),
        Column("stored", ".3f"),
        Column("objects", ",d"),
        Column("write", _RATE),
        *(Column(str(case), _RATE) for case in cases),
        Column("read / wanted, layer", ".2f"),
    )
    body = tuple(
        (
            setting.codec,
            setting.layers,
            one.facts.stored,
            one.facts.objects,
            one.writing.median / 1e6,
            *_rates(one, cases),
            one.facts.amplification["layer"],
        )
        for setting, one in _sorted(measured)
    )
    setting = next(iter(measured))
    comparisons = tuple(
        Comparison(
            f"layers a chunk, {case}",
            f"{one.codec}, one layer a chunk",
            f"{other.layers} layers a chunk",
            measured[one].reading[case].median / measured[other].reading[case].median,
        )
        for other in measured
        if other.layers > 1
        for one in (Setting(other.codec, other.chunk_tokens, other.shard_size),)
        for case in cases
    )
    notes = (
        (
            "The format keeps one layer a chunk and an object. Several are read here by the same reader, as a store of "
            "fewer and wider layers; each lands in memory as it is decoded, without a copy: (batch, layer, position, "
            "feature) for one layer a chunk, (batch, position, layer and feature) for all of them. Putting "
            "layers side by side before they are written is not counted."
        ),
    )
    title = f"Layers a chunk, {setting.chunk_tokens} tokens a chunk, {setting.shard_size} samples a shard"
    return Table(title, columns, body, notes, comparisons)


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
        best = one.ratios[one.best].median
        share = one.ratios[default].median / best if default in one.ratios else None
        rates = [one.rates[setting].median / 1e6 for setting in (one.recommended, one.best)]
        known = (one.predicted.median, one.predicted.low, one.predicted.high) if one.predicted else (None,) * 3
        body.append((str(one.case), str(one.recommended), rates[0], str(one.best), rates[1], one.share, share, *known))
        comparisons.append(Comparison(f"chunk sizes, {one.case}", "the recommended setting", str(one.best), one.share))
        if share is not None:
            comparisons.append(Comparison(f"chunk sizes, {one.case}", "the default", str(one.best), share))
    notes = (
        (
            f"Rates within {TOLERANCE:.0%} are taken as equal, and then the smaller store is recommended; "
            f"of sizes within {SIZE_TOLERANCE:.1%}, the one of fewer objects. *Best* is the fastest of the sweep's "
            "first three, the recommended setting and the default, all read once more in turn; ratios are medians. "
            f"The default is {default}."
        ),
    )
    return Table("The recommendation beside the best of the sweep", columns, tuple(body), notes, tuple(comparisons))


def prediction_table(known: Mapping[Setting, Known], plan: Plan, default: Setting) -> Table:
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


def recommendation(chosen: Candidate, known: Mapping[Setting, Known], plan: Plan, cores: int, *, measured: bool) -> str:
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
    return (
        f"Take codec {setting.codec}, {setting.chunk_tokens} tokens a chunk and {setting.shard_size} samples a shard. "
        f"From storage of {plan.storage_rate / 1e6:,.0f} MB/s{' (measured here)' if measured else ''} with {cores} "
        f"cores, training reads {chosen.rate / 1e6:,.0f} MB of states a second, bound by {bound}, and a byte of states "
        f"takes {chosen.stored:.3f} bytes on disk.{beside} {shards}and {plan.samples:,} samples are "
        f"{chosen.objects * plan.samples:,.0f} objects of states. Of settings within {TOLERANCE:.0%} of the fastest, "
        f"this is the smallest store.\n\n    {setting.flags}"
    )


def write_csv(path: Path, measured: Mapping[Setting, Measured]) -> None:
    """Write everything that was measured, a row a setting; rates are bytes of valid states a second."""
    cases = _read_cases(measured, tuple(ACCESSES))
    fields = ["codec", "chunk_tokens", "shard_size", "layers_per_chunk", "stored_per_byte", "objects"]
    fields += ["open_store_ms", "open_object_ms", "open_object_bytes"]
    fields += [f"read_per_wanted_{access}" for access in ACCESSES]
    names = ["write", *(f"read {case}".replace(" ", "_").replace("/", "_per_") for case in cases)]
    fields += [f"{name}_{part}" for name in names for part in ("low", "median", "high")]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(fields)
        for setting, one in _sorted(measured):
            facts, opening = one.facts, one.facts.opening
            row: list[Cell] = [setting.codec, setting.chunk_tokens, setting.shard_size, setting.layers]
            row += [facts.stored, facts.objects, opening.store_ms, opening.object_ms, opening.object_bytes]
            row += [facts.amplification[access] for access in ACCESSES]
            for rates in (one.writing, *(one.reading.get(case) for case in cases)):
                row += [rates.low, rates.median, rates.high] if rates else [None] * 3
            writer.writerow(row)
