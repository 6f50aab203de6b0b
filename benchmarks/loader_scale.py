"""What a loader costs on large stores: opening, drawing an epoch's order, planning a batch, memory, open files.

``python -m benchmarks.loader_scale`` measures each in a process of its own: a store of a million samples in 4,000
shards, of which only metadata and index are there; three epochs over a store ten times larger than ``prefetch_bytes``;
and one epoch over 5,000 shards.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.costs import elapsed, in_own_process, resident_bytes
from benchmarks.flags import parsed
from benchmarks.samples import BF16, Samples, new_schema, synthetic_states, unsynced, write_samples
from benchmarks.tables import Column, PeerComparison, Recorder, Table
from dspark_store import CacheLoader, open_cache
from dspark_store.format.arrays import array_checksum, array_keys, pack_array
from dspark_store.format.grid import ShardGrid
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.metadata import write_metadata
from dspark_store.format.schema import (
    INDEX_DIGEST,
    INDEX_LENGTH,
    INDEX_OBJECTS,
    INDEX_STATUS,
    INDEX_SUPERVISED,
    StoreSchema,
)
from dspark_store.format.shard import chunk_bounds
from dspark_store.format.storage import LocalStorage
from dspark_store.readers.epoch import PaddedEpoch
from dspark_store.readers.order import BatchPlan, epoch_order
from dspark_store.readers.plan import SampleSpan, byte_runs, object_reads, plan_spans

MIB = 2**20
SAMPLES, SHARDS, LAYERS, SEQ_LENGTH, WIDTH, BATCH = 1_000_000, 4_000, 6, 2048, 4096, 8
PREFETCH_BYTES, EPOCHS = 64 * MIB, 3
MANY_SHARDS, OPEN_OBJECTS = 5_000, 256


def write_index(place: Path) -> None:
    """Write a complete store's metadata and index, with no object behind them."""
    schema = new_schema(SAMPLES, SAMPLES // SHARDS, SEQ_LENGTH, WIDTH, range(LAYERS), "default")
    random = np.random.default_rng(0)
    lengths = random.integers(1, SEQ_LENGTH, SAMPLES, np.int32, endpoint=True)
    specs = {**schema.token_index(), **schema.final_index()}
    values = {
        INDEX_LENGTH: lengths,
        INDEX_SUPERVISED: lengths // 2 + 1,
        INDEX_DIGEST: random.integers(0, 2**64, (SAMPLES, 2), np.uint64),
        INDEX_STATUS: np.zeros(SAMPLES, np.uint8),
        INDEX_OBJECTS: random.integers(1, 2**40, specs[INDEX_OBJECTS].shape, np.uint64),
    }
    storage = LocalStorage(place)
    for path, spec in specs.items():
        (key,) = array_keys(path, spec)
        storage.put(key, pack_array(values[path]))
    record = StoreRecord("0" * 32, schema, phase="complete", declared_complete=True)
    checksums = {path: array_checksum(storage, path, spec) for path, spec in specs.items()}
    write_metadata(storage, record.with_checksums(checksums))


def write_store(place: Path, shards: int, rows: int, seq_length: int, width: int, layers: int) -> None:
    """Write a complete store of full-length samples, codec none; nothing is synced, no power is cut here."""
    states = synthetic_states(seq_length, width)
    samples = Samples(seq_length, width, layers, BF16, (seq_length,) * shards * rows, lambda _: [states] * layers)
    with unsynced():
        write_samples(samples, new_schema(0, rows, seq_length, width, range(layers), "none"), place, 1)


def seconds_of(action: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call."""
    return statistics.median(elapsed(action).clock for _ in range(repeats))


def measure_index(place: Path) -> dict[str, float]:
    """Measure opening a store together with a loader of it, drawing an order, and planning batches."""
    before = resident_bytes()
    started = time.perf_counter()
    loader = CacheLoader(open_cache(place), BATCH, dp_rank=0, dp_size=1)
    loader.cache.index.object_record(SHARDS - 1, 0)
    opened = time.perf_counter() - started
    resident = resident_bytes() - before
    cache, samples = loader.cache, loader.samples
    order = epoch_order(samples, seed=0, epoch=0)
    batches = BatchPlan(len(order), BATCH, 1, "drop")
    epoch = PaddedEpoch(order, cache.lengths, batches, 0, SEQ_LENGTH, longest=True, index=True)
    bounds = {grid: synthetic_bounds(grid) for grid in (cache.schema.tokens, cache.schema.states)}
    steps = iter(np.random.default_rng(1).permutation(batches.steps)[:2000].tolist())
    return {
        "open_s": opened,
        "resident_per_sample": resident / SAMPLES,
        "order_s": seconds_of(lambda: epoch_order(samples, seed=0, epoch=1), 5),
        "plan_ms": 1e3
        * seconds_of(lambda: plan_batch(cache.schema, epoch.request(next(steps), 0).spans, bounds), 2000),
    }


def synthetic_bounds(grid: ShardGrid) -> np.ndarray:
    """Return the `chunk_bounds` of an object whose chunks are all there."""
    sizes = np.full(grid.slots, 400_000, np.uint64)
    return chunk_bounds(np.cumsum(sizes, dtype=np.uint64) - sizes, sizes, grid.chunks_per_row)


def plan_batch(schema: StoreSchema, spans: Sequence[SampleSpan], bounds: Mapping[ShardGrid, np.ndarray]) -> int:
    """Plan a batch of ids, mask, all layers and the last states, as far as byte ranges; return how many there are."""
    ranges = 0
    for grid, columns in ((schema.tokens, ([0], [0])), (schema.states, (range(LAYERS), [0]))):
        plan, of_object = plan_spans(grid, spans, 2048), bounds[grid]
        for slots in columns:
            ranges += sum(len(byte_runs(of_object, read.spans)) for read in object_reads(plan, slots))
    return ranges


def measure_memory(place: Path, batch_size: int = BATCH, prefetch_bytes: int = PREFETCH_BYTES) -> dict[str, float]:
    """Measure resident MiB above the start, at most in each of three epochs."""
    loader = CacheLoader(
        open_cache(place), batch_size, prefetch_bytes=prefetch_bytes, last="short", dp_rank=0, dp_size=1
    )
    before = resident_bytes()
    peaks = [max(resident_bytes() - before for _ in loader) / MIB for _ in range(EPOCHS)]
    return {f"epoch_{number}_mib": peak for number, peak in enumerate(peaks)}


def measure_files(place: Path, open_objects: int = OPEN_OBJECTS) -> dict[str, float]:
    """Count the files that are open at most during an epoch, above the start."""
    cache = open_cache(place, open_objects=open_objects)
    loader = CacheLoader(cache, BATCH, last="short", dp_rank=0, dp_size=1)
    before = open_files()
    return {"open_files": max(open_files() for _ in loader) - before}


def open_files() -> int:
    """Return how many descriptors this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code."""
    given = parsed("loader_scale", arguments)
    torch.set_num_threads(1)
    recorder = Recorder("loader_scale", arguments)
    with tempfile.TemporaryDirectory(dir=given.place) as temporary:
        place = Path(temporary)
        write_index(place / "index")
        index = in_own_process(measure_index, place / "index")
        write_store(place / "memory", shards=14, rows=16, seq_length=512, width=1024, layers=2)
        memory = in_own_process(measure_memory, place / "memory")
        write_store(place / "files", shards=MANY_SHARDS, rows=1, seq_length=4, width=8, layers=1)
        files = in_own_process(measure_files, place / "files")
    recorder.describe(f"{SAMPLES:,} samples, {SHARDS:,} shards, {LAYERS} layers; {os.cpu_count()} cores")
    recorder.add(scale_table(index, memory, files))
    recorder.save(given.json)
    return 0


def scale_table(index: Mapping[str, float], memory: Mapping[str, float], files: Mapping[str, float]) -> Table:
    """Return what was measured, beside what is aimed at."""
    rows: list[tuple[str, float, str, float]] = [
        ("open a store with a loader of it", index["open_s"], "s", 0.3),
        ("resident for it", index["resident_per_sample"], "bytes a sample", 60),
        ("draw an epoch's order", index["order_s"], "s", 0.3),
        (f"plan a batch of {BATCH}", index["plan_ms"], "ms", 0.5),
        *(
            (f"resident above the start, most in epoch {epoch}", peak, "MiB", PREFETCH_BYTES // MIB + 150)
            for epoch, peak in enumerate(memory.values())
        ),
        (f"open files over {MANY_SHARDS:,} shards", files["open_files"], "files", OPEN_OBJECTS),
    ]
    columns = (Column("what"), Column("measured", ",.3f"), Column("unit"), Column("at most", ",g"))
    comparisons = tuple(
        PeerComparison("scale", name, f"the aim, {aim:g} {unit}", aim / value) for name, value, unit, aim in rows
    )
    return Table("Large stores", columns, tuple(rows), (), comparisons)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
