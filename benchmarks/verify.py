"""How fast ``dspark-store verify`` is, beside reading the same store and beside decoding alone.

    python -m benchmarks.verify [STORE] [--threads 2] [--repeats 7]

Three ways over every sample, one after the other and again, from the page cache: `verify`; `Cache.read` of all columns
in batches, checksums checked, into tensors that are used again; and plain decoding, object by object, by as many
threads. Printed are medians of the states' own bytes a second, by the clock and by the processor, and what verifying
is of the others, paired by repeat. Without a store, one of synthetic states a codec is written.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import batched
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.synthetic import synthetic_states
from dspark_store import open_cache
from dspark_store.format.dtypes import cache_dtype
from dspark_store.format.grid import default_chunk_tokens
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.metadata import write_metadata
from dspark_store.format.schema import COLUMNS, LAST, StoreSchema
from dspark_store.format.shard import read_tail
from dspark_store.format.storage import LocalStorage
from dspark_store.format.token_shards import TokenRows
from dspark_store.inspection.verification import verify
from dspark_store.readers.cache import Cache
from dspark_store.readers.tensors import batch_shape, batch_tensor
from dspark_store.writers.pipeline import EncodePipeline
from dspark_store.writers.publish import complete_store, settle_tokens
from dspark_store.writers.states import StateShardWriter
from dspark_store.writers.tokens import write_token_shard

WIDTH, LAYERS, SEQ_LENGTH, SHARD_SIZE, SAMPLES, BATCH = 2560, 5, 1024, 6, 48, 8
CODECS = ("default", "none", "fast")


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one way over a store, by the clock and by all processors together."""

    clock: float
    processor: float


def write_store(place: Path, codec: str) -> None:
    """Write a complete store of synthetic ragged samples whose last layer is the last hidden states."""
    dtype = cache_dtype("bf16")
    tokens = default_chunk_tokens(WIDTH, dtype.itemsize, SEQ_LENGTH, compressed=codec != "none")
    schema = StoreSchema(0, SHARD_SIZE, SEQ_LENGTH, WIDTH, LAYERS, tuple(range(LAYERS)), dtype, codec, tokens)
    storage, record = LocalStorage(place), StoreRecord("0" * 32, schema, manifest={"num_hidden_layers": LAYERS})
    random = np.random.default_rng(0)
    lengths = random.integers(SEQ_LENGTH // 8, SEQ_LENGTH, SAMPLES, endpoint=True).tolist()
    states = synthetic_states(SEQ_LENGTH * (LAYERS + 1), WIDTH).reshape(LAYERS + 1, SEQ_LENGTH, WIDTH)
    with patch.object(os, "fsync"):
        write_metadata(storage, record)
        shards = []
        for shard, part in enumerate(batched(lengths, SHARD_SIZE)):
            ids = [random.integers(0, 50_000, length).astype(np.int32) for length in part]
            shards.append(TokenRows(ids, [np.ones(length, np.uint8) for length in part]))
            write_token_shard(storage, record, shard, shards[-1], cursor=0)
        record = settle_tokens(storage, record)
        with EncodePipeline(2, 64 * 2**20) as pipeline:
            for shard, rows in enumerate(shards):
                options = {"rows": len(rows), "tokens": rows.digest, "pipeline": pipeline, "shared_slot": LAYERS - 1}
                writer = StateShardWriter(storage, record, shard, **options)  # type: ignore[arg-type] # each its own
                for row, length in enumerate(rows.lengths):
                    writer.add(row, list(states[:LAYERS, :length]), states[LAYERS, :length])
                writer.commit()
        complete_store(storage, record)


def state_bytes(cache: Cache) -> int:
    """Return the bytes of valid states, a shared object counted once."""
    schema = cache.schema
    shared = schema.layer_ids and cache.index.is_shared(0, schema.num_layers - 1)
    objects = schema.num_layers + (0 if shared else 1)
    return int(cache.lengths.sum()) * objects * schema.hidden_size * schema.dtype.itemsize


def check(cache: Cache, threads: int) -> None:
    """Verify the store, which must be good."""
    problems = verify(cache.storage, threads=threads).problems
    if problems:
        raise ValueError(f"{problems[0]} ({len(problems)} problems)")


def read(cache: Cache, out: dict[str, torch.Tensor]) -> None:
    """Read every sample, all columns, into the same tensors."""
    for rows in batched(range(len(cache)), BATCH):
        part = {column: tensor[: len(rows)] for column, tensor in out.items()}
        cache.read(rows, layout="stacked", out=part)


def decode(cache: Cache, threads: int) -> None:
    """Decode every state object once, chunk by chunk, with its checksums, and do nothing with it."""
    schema = cache.schema
    names = {
        (shard, item.key(shard))
        for shard in range(schema.tokens.num_shards)
        for item in schema.state_objects
        if not (item.column != LAST and cache.index.is_shared(shard, item.slot))
    }
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(partial(_decode_object, cache), [key for _, key in sorted(names)]))


def _decode_object(cache: Cache, key: str) -> None:
    schema = cache.schema
    chain = schema.chain(LAST)
    reader = cache.storage.open(key)
    tail = read_tail(reader, schema.states.slots)
    out = np.empty((schema.chunk_tokens, schema.hidden_size), schema.dtype.stored)
    stored = np.empty(int(tail.sizes.max()), np.uint8)
    for slot in sorted(np.flatnonzero(tail.present), key=lambda slot: int(tail.offsets[slot])):
        chunk = memoryview(stored)[: int(tail.sizes[slot])]
        reader.read_into(chunk, int(tail.offsets[slot]))
        chain.decode(chunk, out, crc=int(tail.crcs[slot]))
    reader.close()


def timed(action: Callable[[], None]) -> Timing:
    """Run an action once."""
    clock, processor = time.perf_counter(), time.process_time()
    action()
    return Timing(time.perf_counter() - clock, time.process_time() - processor)


def measure(place: Path, name: str, threads: int, repeats: int) -> list[str]:
    """Measure one store; return the rows of a table."""
    cache = open_cache(place, threads=threads, allow_reduced_depth=True)
    slots = range(cache.schema.num_layers)
    shapes = {
        column: batch_shape(cache.schema, column, BATCH, len(slots), cache.schema.seq_length, "stacked")
        for column in COLUMNS
    }
    out = {column: batch_tensor(cache.schema, column, shape, None) for column, shape in shapes.items()}
    ways: dict[str, Callable[[], None]] = {
        "verify": partial(check, cache, threads),
        "read": partial(read, cache, out),
        "decode": partial(decode, cache, threads),
    }
    for action in ways.values():
        action()  # the page cache is warm, and so are the threads
    times: dict[str, list[Timing]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, action in ways.items():
            times[way].append(timed(action))
    nbytes = state_bytes(cache)
    rows = []
    for way, timings in times.items():
        clock = statistics.median(timing.clock for timing in timings)
        processor = statistics.median(timing.processor for timing in timings)
        pairs = list(zip(times["verify"], timings, strict=True))
        by_clock = statistics.median(other.clock / ours.clock for ours, other in pairs)
        by_processor = statistics.median(other.processor / ours.processor for ours, other in pairs)
        rate = f"{nbytes / clock / 1e9:.2f} | {nbytes / processor / 1e9:.2f}"
        rows.append(f"| {name} | {way} | {rate} | {by_clock:.2f}x | {by_processor:.2f}x |")
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", nargs="?", type=Path, help="a complete store, in place of synthetic ones")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args(arguments)
    print("| store | way | GB/s by the clock | GB/s a processor | verify is, by the clock | by the processor |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        places = {given.store.name: given.store} if given.store else {codec: Path(folder, codec) for codec in CODECS}
        for name, place in places.items():
            if given.store is None:
                write_store(place, name)
            for row in measure(place, name, given.threads, given.repeats):
                print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
