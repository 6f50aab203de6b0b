"""How fast ``dspark-store verify`` is, beside reading the same store and beside decoding alone.

    python -m benchmarks.verify [STORE] [--threads 2] [--repeats 7]

Three ways over every sample, one after the other and again, from the page cache: `verify`; `Cache.read` of all columns
in batches, checksums checked, into tensors that are used again; and plain decoding, object by object, by as many
threads. Printed are medians of the states' own bytes per second, by the clock and by the processor, and what verifying
is of the others, paired by repeat. Without a store, one of synthetic states per codec is written.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import batched
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks.costs import elapsed, time_in_turn
from benchmarks.flags import parsed
from benchmarks.samples import new_schema, synthetic_samples, unsynced, write_samples
from benchmarks.tables import Cell, Column, Table
from dspark_store import open_cache
from dspark_store.format.schema import COLUMNS, LAST
from dspark_store.format.shard import read_tail
from dspark_store.inspection.shardwise import Workers
from dspark_store.inspection.verification import verify
from dspark_store.readers.cache import Cache
from dspark_store.readers.tensors import batch_shape, batch_tensor

WIDTH, LAYERS, SEQ_LENGTH, SHARD_SIZE, SAMPLES, BATCH = 2560, 5, 1024, 6, 48, 8
CODECS = ("default", "none", "fast")
UNITS = ("clock", "processor")


def write_store(place: Path, codec: str) -> None:
    """Write a complete store of synthetic ragged samples whose last layer is the last hidden states."""
    samples = synthetic_samples(SEQ_LENGTH, WIDTH, LAYERS, SAMPLES, ragged=True)
    with unsynced():
        write_samples(samples, new_schema(0, SHARD_SIZE, SEQ_LENGTH, WIDTH, range(LAYERS), codec), place, 2)


def distinct_objects(cache: Cache) -> list[tuple[int, str]]:
    """Return shard and key of every state object, one that stands at two places once."""
    return [
        (shard, item.key(shard))
        for shard in range(cache.schema.tokens.num_shards)
        for item in cache.schema.state_objects
        if item.column == LAST or not cache.index.is_shared(shard, item.slot)
    ]


def state_bytes(cache: Cache) -> int:
    """Return the bytes of valid states, a shared object counted once."""
    schema = cache.schema
    tokens = sum(int(cache.lengths[schema.tokens.rows(shard)].sum()) for shard, _ in distinct_objects(cache))
    return tokens * schema.hidden_size * schema.dtype.itemsize


def check(cache: Cache, threads: int) -> None:
    """Verify the store, which must be good."""
    problems = verify(cache.storage, workers=Workers(threads)).problems
    if problems:
        raise ValueError(f"{problems[0]} ({len(problems)} problems)")


def read(cache: Cache, out: dict[str, torch.Tensor]) -> None:
    """Read every sample, all columns, into the same tensors."""
    for rows in batched(range(len(cache)), BATCH):
        part = {column: tensor[: len(rows)] for column, tensor in out.items()}
        cache.read(rows, layout="stacked", out=part)


def decode(cache: Cache, threads: int) -> None:
    """Decode every state object once, chunk by chunk, with its checksums, and do nothing with it."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(partial(_decode_object, cache), [key for _, key in distinct_objects(cache)]))


def _decode_object(cache: Cache, key: str) -> None:
    schema = cache.schema
    chain = schema.chain(LAST)
    reader = cache.storage.open(key)
    tail = read_tail(reader, schema.states)
    out = np.empty((schema.chunk_tokens, schema.hidden_size), schema.dtype.stored)
    begins, ends = tail.bounds[:, :-1].ravel(), tail.bounds[:, 1:].ravel()
    for slot in sorted(np.flatnonzero(tail.present), key=lambda slot: int(begins[slot])):
        chunk = memoryview(reader.read(int(begins[slot]), int(ends[slot] - begins[slot])))
        chain.decode(chunk, out, crc=int(tail.crcs.flat[slot]))
    reader.close()


def measure(place: Path, name: str, threads: int, repeats: int) -> list[tuple[Cell, ...]]:
    """Measure one store; return the rows of a table."""
    cache = open_cache(place, threads=threads, allow_reduced_depth=True)
    schema = cache.schema
    shapes = {
        column: batch_shape(schema, column, BATCH, schema.num_layers, schema.seq_length, "stacked")
        for column in COLUMNS
    }
    out = {column: batch_tensor(schema, column, shape, None) for column, shape in shapes.items()}
    ways: dict[str, Callable[[], None]] = {
        "verify": partial(check, cache, threads),
        "read": partial(read, cache, out),
        "decode": partial(decode, cache, threads),
    }
    for action in ways.values():
        action()  # the page cache is warm, and so are the threads
    times = time_in_turn({way: partial(elapsed, action) for way, action in ways.items()}, repeats)
    nbytes, rows = state_bytes(cache), list[tuple[Cell, ...]]()
    for way, found in times.items():
        seconds = [median(getattr(one, unit) for one in found) for unit in UNITS]
        pairs = list(zip(times["verify"], found, strict=True))
        ratios = [median(getattr(other, unit) / getattr(ours, unit) for ours, other in pairs) for unit in UNITS]
        rows.append((name, way, *(nbytes / each / 1e9 for each in seconds), *ratios))
    return rows


def main(arguments: Sequence[str]) -> int:
    """Run the measurement; return the exit code."""
    given = parsed("verify", arguments)
    rows: list[tuple[Cell, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        places = {given.store.name: given.store} if given.store else {codec: Path(folder, codec) for codec in CODECS}
        for name, place in places.items():
            if given.store is None:
                write_store(place, name)
            rows += measure(place, name, given.threads, given.repeats)
    rates = ("GB/s by the clock", "GB/s per processor", "verify is, by the clock", "by the processor")
    columns = (Column("store"), Column("way"), *map(Column, rates))
    print(Table("Verifying", columns, tuple(rows)).markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
