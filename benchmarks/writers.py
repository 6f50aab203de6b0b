"""What writing costs: memory over the rows of a shard, encoding rate beside plain threads, cost beside a forward.

``python -m benchmarks.writers [--width 4096] [--codec default] [--only memory|rates|cost]``. Rates are medians of
alternating runs, given as ratios; memory is the peak resident set above the level before the first shard, each case in
a process of its own. The cost is that of a whole capture: see `benchmarks.writing_cost`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks import writing_cost
from benchmarks.resident import peak_of, resident_bytes
from benchmarks.synthetic import synthetic_states
from benchmarks.tables import Column, Comparison, Recorder, Table
from dspark_store.format.dtypes import cache_dtype, tensor_bits
from dspark_store.format.grid import default_chunk_tokens
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.metadata import write_metadata
from dspark_store.format.schema import StoreSchema
from dspark_store.format.storage import LocalStorage
from dspark_store.writers.pipeline import EncodePipeline
from dspark_store.writers.states import StateShardWriter

LAYERS, SEQ_LENGTH, LENGTH = 5, 1024, 256
MEMORY_SAMPLES = 256
RATE_SAMPLES, RATE_SHARD = 256, 256  # the default of --shard-size
BUFFER_BYTES = 64 * 1024 * 1024
PARTS = ("memory", "rates", "cost")


def new_record(width: int, codec: str, shard_size: int) -> StoreRecord:
    """Return the record of a bf16 store of 5 layers whose last one is the last hidden state."""
    dtype = cache_dtype("bf16")
    tokens = default_chunk_tokens(width, dtype.itemsize, SEQ_LENGTH, compressed=codec != "none")
    schema = StoreSchema(shard_size, shard_size, SEQ_LENGTH, width, LAYERS, (1, 2, 3, 4, 5), dtype, codec, tokens)
    return StoreRecord("0" * 32, schema)


def write_shards(record: StoreRecord, samples: Sequence[torch.Tensor], count: int, place: Path, *, fresh: bool) -> None:
    """Write ``count`` samples, cycling through ``samples``, in committed shards of R, encoding on two threads.

    With ``fresh``, every state comes in memory of its own, as a forward gives it.
    """
    storage = LocalStorage(place)
    write_metadata(storage, record)
    rows = record.schema.shard_size
    with EncodePipeline(2, BUFFER_BYTES) as pipeline:
        for shard in range(count // rows):
            writer = StateShardWriter(
                storage, record, shard, rows=rows, tokens="0" * 32, pipeline=pipeline, shared_slot=LAYERS - 1
            )
            for row in range(rows):
                states = samples[row % len(samples)]
                layers = [states.clone() if fresh else states for _ in range(LAYERS)]
                writer.add(row, layers, layers[-1])
            writer.commit()


def measure_memory(width: int, codec: str, shard_size: int, place: Path) -> int:
    """Return the peak resident bytes above the level before the first shard, in this very process."""
    samples = [synthetic_states(LENGTH, width, seed) for seed in range(4)]
    record = new_record(width, codec, shard_size)
    before = resident_bytes("VmRSS")
    return peak_of(lambda: write_shards(record, samples, MEMORY_SAMPLES, place, fresh=True)) - before


def memory_in_processes(width: int, codec: str, shard_size: int, place: Path) -> float:
    """Run `measure_memory` in fresh processes, three times; return the median."""
    return statistics.median(_memory_in_process(width, codec, shard_size, place / str(run)) for run in range(3))


def _memory_in_process(width: int, codec: str, shard_size: int, place: Path) -> int:
    command = [sys.executable, "-m", "benchmarks.writers", "--width", str(width), "--codec", codec]
    command += ["--memory-of", str(shard_size), "--place", str(place)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=dict(os.environ))
    shutil.rmtree(place)
    return int(json.loads(done.stdout)["peak"])


def plain_threads(record: StoreRecord, samples: Sequence[torch.Tensor], rows: int) -> None:
    """Encode the same chunks with two threads and the codec alone."""
    chain, step = record.schema.chain("target_last_hidden_states"), record.schema.chunk_tokens
    chunks = [tensor_bits(states[first : first + step]) for states in samples for first in range(0, LENGTH, step)]
    tasks = [chunk for _ in range(rows * LAYERS // len(samples)) for chunk in chunks]
    with ThreadPoolExecutor(2) as pool:
        for _ in pool.map(chain.compressor.compress, tasks):
            pass


def seconds_of(action: Callable[[], object]) -> tuple[float, float]:
    """Time one call: seconds on the clock, and of the processor."""
    started = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - started[0], time.process_time() - started[1]


def measure_rates(
    width: int, codec: str, place: Path, repeats: int, rows: int = RATE_SAMPLES
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the median rates, bytes of states a second, of the whole writer and of plain threads, alternating.

    Each is given by the clock and by processor time, which other programs on the machine do not disturb.
    """
    samples = [synthetic_states(LENGTH, width, seed) for seed in range(4)]
    record = new_record(width, codec, RATE_SHARD)
    nbytes = rows * LAYERS * samples[0].nbytes
    writer, plain = [], []
    for repeat in range(repeats):
        target = place / f"rate-{repeat}"
        writer.append(seconds_of(lambda target=target: write_shards(record, samples, rows, target, fresh=False)))  # type: ignore[misc]
        shutil.rmtree(target)
        plain.append(seconds_of(lambda: plain_threads(record, samples, rows)))
    clock, processor = (
        (
            nbytes / statistics.median(run[which] for run in writer),
            nbytes / statistics.median(run[which] for run in plain),
        )
        for which in (0, 1)
    )
    return clock, processor


def memory_table(width: int, codec: str, place: Path) -> Table:
    """Measure memory over R."""
    peaks = {rows: memory_in_processes(width, codec, rows, place / f"r{rows}") for rows in (16, 256)}
    columns = (Column("samples a shard", "d"), Column("peak above the level before the first shard, MiB", ",.1f"))
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
    measured = dict(zip(("a second", "a processor second"), measure_rates(width, codec, place, repeats), strict=True))
    rows = tuple((unit, ours / 1e6, plain / 1e6, ours / plain) for unit, (ours, plain) in measured.items())
    comparisons = tuple(
        Comparison(f"writing, {unit}", "the writer", "two plain threads and the codec alone", ours / plain)
        for unit, (ours, plain) in measured.items()
    )
    note = (
        "The writer casts, checks, encodes, checksums, writes and syncs, with two encoding threads. Beside it, two "
        "plain threads encode the same chunks and drop them."
    )
    return Table(f"The rate of the writer, shards of {RATE_SHARD} samples", columns, rows, (note,), comparisons)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.writers", description=__doc__)
    parser.add_argument("--width", type=int, default=4096, help="H, the hidden size (default: 4096)")
    parser.add_argument("--codec", default="default", help="codec preset (default: default)")
    parser.add_argument("--repeats", type=int, default=7, help="alternating runs (default: 7)")
    parser.add_argument(
        "--tokens-per-second", type=float, default=500, help="rate of the cost's forward (default: 500)"
    )
    parser.add_argument("--samples", type=int, default=64, help="samples of 128 tokens a run of the cost (default: 64)")
    parser.add_argument("--only", choices=PARTS, help="measure one thing (default: all)")
    parser.add_argument("--place", type=Path, help="directory to write in (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="file to write the outcome to")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.memory_of:
        print(json.dumps({"peak": measure_memory(given.width, given.codec, given.memory_of, given.place)}))
        return 0
    recorder = Recorder("writers", arguments)
    recorder.describe(
        f"synthetic states: H={given.width}, K={LAYERS}, bf16, codec {given.codec}; {os.cpu_count()} cores"
    )
    with tempfile.TemporaryDirectory(dir=given.place) as temporary:
        for part in PARTS if given.only is None else (given.only,):
            recorder.add(_table(part, given, Path(temporary) / part))
    recorder.save(given.json)
    return 0


def _table(part: str, given: argparse.Namespace, place: Path) -> Table:
    place.mkdir()
    if part == "memory":
        return memory_table(given.width, given.codec, place)
    if part == "rates":
        return rates_table(given.width, given.codec, place, given.repeats)
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
