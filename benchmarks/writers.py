"""What writing costs: memory over the rows of a shard, encoding rate beside plain threads, cost beside a forward.

``python -m benchmarks.writers [--width 4096] [--codec default] [--only memory|rates|cost|idle|peers]``. Rates are
medians of alternating runs, given as ratios; memory is the peak resident set above the level before the first shard,
each case in a process of its own. The cost is that of a whole capture: see `benchmarks.writing_cost`; so is ``idle``,
of a target that sleeps. ``peers`` writes ``--gigabytes`` of states beside DeepSpec's writer.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks import writing_cost
from benchmarks.costs import Elapsed, elapsed, in_own_process, peak_of, resident_bytes
from benchmarks.flags import WRITER_PARTS, parsed
from benchmarks.peer_writing import RAGGED, ways_to_write
from benchmarks.peers import rate_table
from benchmarks.samples import BF16, Samples, new_schema, synthetic_samples, synthetic_states, write_samples
from benchmarks.storage import distinct_files
from benchmarks.tables import Column, PeerComparison, Recorder, Table

LAYERS, SEQ_LENGTH, LENGTH = 5, 1024, 256
MEMORY_SAMPLES = 256
RATE_SAMPLES, RATE_SHARD = 256, 256  # the default of --shard-size
BUFFER_BYTES = 64 * 2**20
PEER_WIDTH, PEER_SHARD, CODECS = 2560, 16, ("none", "default")


def repeated_samples(width: int, count: int, *, fresh: bool) -> Samples:
    """Return ``count`` samples, cycling through a few, five layers of the same states.

    With ``fresh``, every state comes in memory of its own, as a forward gives it.
    """
    pool = [synthetic_states(LENGTH, width, seed) for seed in range(4)]

    def states(sample: int) -> Sequence[torch.Tensor]:
        found = pool[sample % len(pool)]
        return [found.clone() if fresh else found for _ in range(LAYERS)]

    return Samples(SEQ_LENGTH, width, LAYERS, BF16, (LENGTH,) * count, states)


def write(samples: Samples, codec: str, shard_size: int, place: Path) -> Elapsed:
    """Write the samples in shards of R, encoding on two threads; return the time that their states took."""
    schema = new_schema(0, shard_size, SEQ_LENGTH, samples.width, range(1, LAYERS + 1), codec)
    return write_samples(samples, schema, place, 2, buffer_bytes=BUFFER_BYTES)


def measure_memory(width: int, codec: str, shard_size: int, place: Path) -> int:
    """Return the peak resident bytes above the level before the first shard, in this very process."""
    torch.set_num_threads(1)
    samples = repeated_samples(width, MEMORY_SAMPLES, fresh=True)
    before = resident_bytes()
    return peak_of(lambda: write(samples, codec, shard_size, place)) - before


def memory_in_processes(width: int, codec: str, shard_size: int, place: Path) -> float:
    """Run `measure_memory` in fresh processes, three times; return the median."""
    return statistics.median(
        in_own_process(measure_memory, width, codec, shard_size, place / str(run)) for run in range(3)
    )


def measure_rates(width: int, codec: str, place: Path, repeats: int) -> dict[str, tuple[float, float]]:
    """Return the median rates, bytes of states per second, of the whole writer and of plain threads, alternating.

    They are given by the clock and by processor time, which other programs on the machine do not disturb.
    """
    samples = repeated_samples(width, RATE_SAMPLES, fresh=False)
    schema = new_schema(0, RATE_SHARD, SEQ_LENGTH, width, range(1, LAYERS + 1), codec)
    ours, plain = [], []
    for repeat in range(repeats):
        target = place / f"rate-{repeat}"
        ours.append(write(samples, codec, RATE_SHARD, target))
        shutil.rmtree(target)
        rows = (states for sample in range(RATE_SAMPLES) for states in samples.states(sample))
        plain.append(elapsed(partial(writing_cost.encode_plainly, schema, rows, 2)))

    def median_rate(seconds: Iterable[float]) -> float:
        return samples.state_bytes / statistics.median(seconds)

    return {
        "a second": (median_rate(run.clock for run in ours), median_rate(run.clock for run in plain)),
        "a processor second": (median_rate(run.processor for run in ours), median_rate(run.processor for run in plain)),
    }


def memory_table(width: int, codec: str, place: Path) -> Table:
    """Measure memory over R."""
    peaks = {rows: memory_in_processes(width, codec, rows, place / f"r{rows}") for rows in (16, 256)}
    columns = (Column("samples per shard", "d"), Column("peak above the level before the first shard, MiB", ",.1f"))
    note = f"The larger shards take {peaks[256] / peaks[16]:.3f} of the smaller ones' peak."
    return Table("Memory over the size of a shard", columns, tuple((r, p / 2**20) for r, p in peaks.items()), (note,))


def rates_table(width: int, codec: str, place: Path, repeats: int) -> Table:
    """Measure encoding rates."""
    columns = (
        Column("MB of states"),
        Column("the writer", ",.0f"),
        Column("the codec alone", ",.0f"),
        Column("ratio", ".3f"),
    )
    measured = measure_rates(width, codec, place, repeats)
    rows = tuple((unit, ours / 1e6, plain / 1e6, ours / plain) for unit, (ours, plain) in measured.items())
    comparisons = tuple(
        PeerComparison(f"writing, {unit}", "the writer", "two plain threads and the codec alone", ours / plain)
        for unit, (ours, plain) in measured.items()
    )
    note = (
        "The writer casts, checks, encodes, checksums, writes and syncs, with two encoding threads. Beside it, two "
        "plain threads encode the same chunks and drop them."
    )
    return Table(f"The rate of the writer, shards of {RATE_SHARD} samples", columns, rows, (note,), comparisons)


def peers_table(gigabytes: float, place: Path, repeats: int) -> Table:
    """Write as many states beside DeepSpec's writer, each to the disk, where fixed costs vanish."""
    sample_bytes = SEQ_LENGTH * LAYERS * PEER_WIDTH * BF16.itemsize
    count = max(2 * PEER_SHARD, round(gigabytes * 1e9 / sample_bytes))
    samples = synthetic_samples(SEQ_LENGTH, PEER_WIDTH, LAYERS, count, ragged=False)
    schemas = {
        codec: new_schema(0, PEER_SHARD, SEQ_LENGTH, PEER_WIDTH, range(1, LAYERS + 1), codec) for codec in CODECS
    }
    found = ways_to_write(samples, schemas, 2)
    ways = {name: found[name] for name in (*(f"ours, {codec}" for codec in CODECS), RAGGED)}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    stored: dict[str, float] = {}
    for _ in range(repeats):
        for name, write_all in ways.items():
            rates[name].append(count / elapsed(partial(write_all, place / "written")).clock)
            stored[name] = sum(distinct_files(place / "written").values()) / count
            shutil.rmtree(place / "written")
    title = f"Writing {samples.state_bytes / 1e9:.1f} GB of states beside DeepSpec's writer"
    note = f"H={PEER_WIDTH}, S={SEQ_LENGTH}, full rows, R={PEER_SHARD}. Both end when all files are on the disk."
    return rate_table(title, rates, stored, samples, RAGGED, [note])


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code."""
    given = parsed("writers", arguments)
    torch.set_num_threads(1)
    recorder = Recorder("writers", arguments)
    recorder.describe(
        f"synthetic states: H={given.width}, K={LAYERS}, bf16, codec {given.codec}; {os.cpu_count()} cores"
    )
    with tempfile.TemporaryDirectory(dir=given.place) as temporary:
        for part in WRITER_PARTS if given.only is None else (given.only,):
            recorder.add(_table(part, given, Path(temporary) / part))
    recorder.save(given.json)
    return 0


def _table(part: str, given: argparse.Namespace, place: Path) -> Table:
    place.mkdir()
    if part == "memory":
        return memory_table(given.width, given.codec, place)
    if part == "rates":
        return rates_table(given.width, given.codec, place, given.repeats)
    if part == "idle":
        return writing_cost.idle_table(place, pairs=min(given.repeats, 3))
    if part == "peers":
        return peers_table(given.gigabytes, place, min(given.repeats, 3))
    return writing_cost.cost_table(
        given.width,
        given.codec,
        place,
        pairs=given.repeats,
        tokens_per_second=given.tokens_per_second,
        samples=given.samples,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
