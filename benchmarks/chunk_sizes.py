"""Which chunk size, codec and shard size to take: measured on real states, and recommended for a storage and cores.

``python -m benchmarks.chunk_sizes --store STORE [--sweep] [--quick]``. Without ``--sweep`` it encodes and decodes a few
samples with each codec and T, and says what to give the precompute. With it, every setting is written and read in every
way; then the recommended ones are measured once more beside the best of the sweep. Rates are of valid states.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.flags import parser_of
from benchmarks.measure import ACCESSES, BATCH, Axes, Setting, chosen_axes, default_axes, default_setting
from benchmarks.recommend import Search, StorePlan, prediction_table, recommendation
from benchmarks.samples import Samples, stored_samples
from benchmarks.storage import measured_rate
from benchmarks.sweep import (
    LIMITED_ACCESSES,
    UNLIMITED,
    Effort,
    Measured,
    ReadCase,
    RunOff,
    Sweep,
    in_order,
    read_cases,
    run_off_table,
    sweep_tables,
)
from benchmarks.tables import Cell, Recorder, usable_cores
from dspark_store import open_cache
from dspark_store.precompute.run import run
from dspark_store.precompute.settings import PrecomputeConfig

SWEPT_RATES = (100e6, 500e6)
DEMO = Path("demo")


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code, 2 after a user's mistake."""
    given = _parse(arguments)
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="chunk-sizes-", dir=given.place) as temporary:
            return _measure(given, Recorder("chunk_sizes", arguments), Path(temporary))
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("chunk_sizes")
    given = parser.parse_args(arguments)
    if (given.target is None) != (given.input_data is None):
        parser.error("give --target and --input-data together")
    for name in ("storage_rate", "cores", "num_samples", "rounds", "sample_mb"):
        value = getattr(given, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0, got {value}")
    given.sample_mb = given.sample_mb or (24 if given.quick else 64)
    return given


def _measure(given: argparse.Namespace, recorder: Recorder, place: Path) -> int:
    samples, store_samples, name = _samples(given, place)
    wanted = Axes(tuple(given.codec), tuple(given.chunk_tokens), tuple(given.shard_size), tuple(given.layers_per_chunk))
    axes = chosen_axes(default_axes(samples, quick=given.quick), wanted, samples)
    cores = usable_cores()
    rounds = given.rounds or (3 if given.quick else 7)
    recorder.describe(
        f"real states of {name}: H={samples.width}, K={samples.layers}, S={samples.seq_length}, {samples.dtype.name}, "
        f"{len(samples.lengths)} samples of {sum(samples.lengths) / len(samples.lengths):.0f} tokens in the mean, "
        f"{samples.state_bytes / 1e6:.0f} MB of states; batches of {BATCH}, {cores} cores"
    )
    rate = given.storage_rate * 1e6 if given.storage_rate else measured_rate(given.place or place, cores)
    bar = _Bar()
    search = Search(samples, axes, place / "search", cores, rounds, bar)
    plan = StorePlan(
        given.num_samples or store_samples,
        samples.layers,
        samples.state_bytes / len(samples.lengths),
        BATCH,
        rate,
        (given.cores or cores) / cores,
    )
    chosen, known = search.recommend(plan)
    measured: Mapping[Setting, Measured] = {}
    run_offs: list[RunOff] = []
    if given.sweep:
        effort = Effort(2, 1, rounds, 25.0) if given.quick else Effort(read_rounds=rounds)
        sweep = Sweep(samples, axes, place / "sweep", cores, effort, bar)
        measured = sweep.run(SWEPT_RATES)
        run_offs = [
            sweep.judged(search, measured, ReadCase(access, rate))
            for access in LIMITED_ACCESSES
            for rate in (*SWEPT_RATES, UNLIMITED)
        ]
        for table in (*sweep_tables(measured, samples), run_off_table(run_offs, default_setting(samples))):
            recorder.add(table)
    recorder.add(prediction_table(known, plan, default_setting(samples)))
    paragraph = recommendation(chosen, known, plan, given.cores or cores, measured=not given.storage_rate)
    print(f"\n{paragraph}", flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    plots: list[str] = []
    if measured:
        write_csv(given.out / "chunk_sizes.csv", measured)
        plots = _plots(given.out, samples, measured, run_offs)
    figures = {"recommended": chosen.setting.flags, "paragraph": paragraph}
    recorder.outcome(plots=plots, figures=figures).save(given.out / "chunk_sizes.json")
    print(f"\nwritten to {given.out}: {', '.join(sorted(['chunk_sizes.json', *plots]))}", file=sys.stderr)
    return 0


def _samples(given: argparse.Namespace, place: Path) -> tuple[Samples, int, str]:
    """Return the samples, how many the store has, and the target's name."""
    store = given.store
    if given.target is not None:
        store = place / "captured"
        flags = {"target_model": given.target, "input_data": str(given.input_data), "output_dir": str(store)}
        run(PrecomputeConfig(**flags, seq_length=512, batch_size=4, max_samples=80, device="cpu"))
    elif store is None:
        store = DEMO / "store"
        if not store.exists():
            raise FileNotFoundError(
                f"{store} not found: run `make demo` first, or give --store STORE, or --target and --input-data"
            )
    samples = stored_samples(store, nbytes=int(given.sample_mb * 1e6))
    cache = open_cache(store, allow_reduced_depth=True)
    return samples, len(cache), Path(str(cache.manifest.get("target_model", "a target"))).name


def _plots(out: Path, samples: Samples, measured: Mapping[Setting, Measured], run_offs: Sequence[RunOff]) -> list[str]:
    try:
        from benchmarks import plots
    except ImportError as error:
        print(f"no plots: {error}; pip install 'dspark-store[plot]'", file=sys.stderr)
        return []
    made = plots.heat_maps(out, measured, list(ACCESSES))
    return [*made, plots.size_against_speed(out, measured, run_offs, default_setting(samples))]


def write_csv(path: Path, measured: Mapping[Setting, Measured]) -> None:
    """Write everything that was measured, a row for each setting; rates are bytes of valid states per second."""
    cases = read_cases(measured, ACCESSES)
    rows: list[dict[str, Cell]] = []
    for setting, one in in_order(measured):
        axes, facts = asdict(setting), one.facts
        row: dict[str, Cell] = {"layers_per_chunk" if name == "layers" else name: value for name, value in axes.items()}
        row |= {"stored_per_byte": facts.stored, "objects": facts.objects}
        row |= {f"open_{name}": value for name, value in asdict(facts.opening).items()}
        row |= {f"read_per_wanted_{access}": facts.amplification[access] for access in ACCESSES}
        for name, found in {"write": one.writing, **{f"read {case}": one.reading.get(case) for case in cases}}.items():
            field = name.replace(" ", "_").replace("/", "_per_")
            row |= {
                f"{field}_{part}": None if found is None else getattr(found, part) for part in ("low", "median", "high")
            }
        rows.append(row)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


class _Bar:
    """Shows how far a long step is."""

    def __init__(self) -> None:
        self._bar, self._what = tqdm(mininterval=5, leave=False, disable=None), ""

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what:
            self._what = what
            self._bar.reset(total)
            self._bar.set_description_str(what)
        self._bar.update(done - self._bar.n)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
