"""Batches from disk: this reader with each codec beside the peers, on the same samples in one run.

``python -m benchmarks.loaders [--quick] [--store STORE] [--place DIR]``. Every contender reads the same random batches,
alternating; figures are medians with their quartiles, rates of valid state bytes (K + 1 vectors a token), and ratios.
Warm means in the page cache; cold, after the files were dropped from it; limited, behind a line of fixed rate.
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
from pathlib import Path

import numpy as np
import torch

from benchmarks.peers import (
    Contender,
    DaskReader,
    MappedRagged,
    Ours,
    SafetensorsShards,
    TensorStoreReader,
    ZarrPython,
)
from benchmarks.synthetic import synthetic_states
from benchmarks.throttle import RateLimit, RateLimitedStorage
from dspark_store import Cache, open_cache
from dspark_store.format.codecs import CRC_BYTES
from dspark_store.format.dtypes import cache_dtype
from dspark_store.format.grid import default_chunk_tokens
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.metadata import write_metadata
from dspark_store.format.objects import Expected, open_object
from dspark_store.format.schema import LAST, StoreSchema
from dspark_store.format.storage import LocalStorage
from dspark_store.writers.pipeline import EncodePipeline
from dspark_store.writers.publish import complete_store, settle_tokens
from dspark_store.writers.states import StateShardWriter
from dspark_store.writers.tokens import TokenRows, write_token_shard

LAYERS, BATCH, SHARD_SIZE, THREADS = 5, 8, 16, 2
PIPELINES = {
    "zarr-python, default pipeline": "zarr.core.codec_pipeline.BatchedCodecPipeline",
    "zarr-python, fused pipeline": "zarr.core.codec_pipeline.FusedCodecPipeline",
    "zarr-python, zarrs pipeline": "zarrs.ZarrsCodecPipeline",
}


@dataclass(frozen=True, slots=True)
class Case:
    """Samples to measure on: S positions, H features, and every sample's length. ``states`` gives sample i's layers."""

    seq_length: int
    width: int
    lengths: tuple[int, ...]
    states: Callable[[int], Sequence[torch.Tensor]]

    @property
    def mean_bytes(self) -> float:
        """Valid state bytes of a sample in the mean."""
        return statistics.mean(self.lengths) * (LAYERS + 1) * self.width * 2


def synthetic_case(seq_length: int, width: int, samples: int, *, ragged: bool) -> Case:
    """Return synthetic samples of full length, or of lengths evenly spread between one token and S."""
    generator = np.random.Generator(np.random.PCG64(0))
    lengths = (
        np.full(samples, seq_length)
        if not ragged
        else generator.permutation(samples) * (seq_length - 1) // (samples - 1) + 1
    )
    pool = [synthetic_states(seq_length, width, seed) for seed in range(LAYERS + 2)]

    def states(sample: int) -> Sequence[torch.Tensor]:
        return [pool[(sample + layer) % len(pool)][: lengths[sample]] for layer in range(LAYERS)]

    return Case(seq_length, width, tuple(int(length) for length in lengths), states)


def stored_case(store: Path, samples: int) -> Case:
    """Return the first samples of a real store of at least 5 layers."""
    cache = open_cache(store)
    count = min(samples, len(cache)) // SHARD_SIZE * SHARD_SIZE
    layers = cache.layer_ids[-LAYERS:]

    def states(sample: int) -> Sequence[torch.Tensor]:
        length = int(cache.lengths[sample])
        item = cache.read([sample], layers=layers, positions=slice(0, length), layout="stacked")
        return list(item["target_hidden_states"][0])

    lengths = tuple(int(length) for length in cache.lengths[:count])
    return Case(cache.schema.seq_length, cache.schema.hidden_size, lengths, states)


def write_case(case: Case, codec: str, place: Path) -> Path:
    """Write a case as a store of five layers, the last of which is the last hidden state; return its path."""
    dtype = cache_dtype("bf16")
    tokens = default_chunk_tokens(case.width, dtype.itemsize, case.seq_length, compressed=codec != "none")
    count = len(case.lengths)
    schema = StoreSchema(count, SHARD_SIZE, case.seq_length, case.width, LAYERS, (1, 2, 3, 4, 5), dtype, codec, tokens)
    record, storage = StoreRecord("0" * 32, schema), LocalStorage(place)
    write_metadata(storage, record)
    with EncodePipeline(THREADS, 256 * 1024 * 1024) as pipeline:
        for shard in range(schema.tokens.num_shards):
            members = schema.tokens.rows(shard)
            ids = [np.arange(case.lengths[sample], dtype=np.int32) for sample in members]
            rows = TokenRows(ids, [np.ones(len(row), np.uint8) for row in ids])
            write_token_shard(storage, record, shard, rows, members.stop)
            writer = StateShardWriter(
                storage, record, shard, rows=len(rows), tokens=rows.digest, pipeline=pipeline, shared_slot=LAYERS - 1
            )
            for row, sample in enumerate(members):
                layers = case.states(sample)
                writer.add(row, layers, layers[-1])
            writer.commit()
    complete_store(storage, settle_tokens(storage, record))
    return place


def random_batches(samples: int, count: int) -> list[list[int]]:
    """Return ``count`` random batches, every sample at most once a round."""
    generator = np.random.Generator(np.random.PCG64(1))
    batches: list[list[int]] = []
    while len(batches) < count:
        order = generator.permutation(samples)
        batches += [order[first : first + BATCH].tolist() for first in range(0, samples - BATCH + 1, BATCH)]
    return batches[:count]


def stored_chunks(cache: Cache, sample: int) -> list[memoryview]:
    """Return the encoded chunks of a sample's distinct states, without their checksums."""
    schema = cache.schema
    shard, row = schema.tokens.locate(sample)
    chunks: list[memoryview] = []
    distinct = [
        item for item in schema.state_objects if not cache.index.is_shared(shard, item.slot) or item.column == LAST
    ]
    for item in distinct:
        expected = Expected(cache.record.store_id, item.place(shard))
        stored = open_object(cache.storage, item.key(shard), schema.states.slots, expected)
        first = row * schema.states.chunks_per_row
        for slot in range(first, first + schema.states.chunks_of(int(cache.lengths[sample]))):
            data = stored.reader.read(int(stored.tail.offsets[slot]), int(stored.tail.sizes[slot]))
            chunks.append(memoryview(data)[:-CRC_BYTES])
        stored.reader.close()
    return chunks


def decode_reference(cache: Cache) -> Callable[[Sequence[int]], float]:
    """Return a function that times two plain threads decoding a batch's own chunks, already in memory."""
    schema, chain = cache.schema, cache.schema.chain(LAST)
    pool = ThreadPoolExecutor(THREADS)
    scratch = [np.empty((schema.chunk_tokens, schema.hidden_size), schema.dtype.stored) for _ in range(64)]

    def measure(batch: Sequence[int]) -> float:
        chunks = [chunk for sample in batch for chunk in stored_chunks(cache, sample)]
        started = time.perf_counter()
        jobs = [pool.submit(chain.compressor.decompress, chunk, scratch[at % 64]) for at, chunk in enumerate(chunks)]
        for job in jobs:
            job.result()
        return time.perf_counter() - started

    return measure


def drop_from_cache(place: Path) -> None:
    """Ask the kernel to drop a directory's files from the page cache."""
    for path in place.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def alternate(
    contenders: Sequence[Contender], batches: Sequence[Sequence[int]], *, cold: bool
) -> dict[str, list[float]]:
    """Time every contender on every batch, alternating; return samples a second, by name."""
    rates: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for batch in batches:
        for contender in contenders:
            if cold:
                contender.close()
                drop_from_cache(contender.files)
            started = time.perf_counter()
            contender.batch(batch)
            rates[contender.name].append(len(batch) / (time.perf_counter() - started))
    return rates


def print_rates(
    title: str, rates: dict[str, list[float]], case: Case, contenders: Sequence[Contender], base: str
) -> None:
    """Print a table: median samples a second with quartiles, rate of valid bytes, stored bytes a sample, ratio."""
    print(f"\n{title}\n")
    print("| contender | samples/s (quartiles) | GB/s of states | KB stored a sample | ratio |")
    print("|---|---|---|---|---|")
    reference = statistics.median(rates[base])
    for contender in contenders:
        values = rates[contender.name]
        low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        stored = contender.stored_bytes(range(len(case.lengths))) / len(case.lengths) / 1e3
        print(
            f"| {contender.name} | {middle:.1f} ({low:.1f} to {high:.1f}) | {middle * case.mean_bytes / 1e9:.2f} | "
            f"{stored:,.0f} | {middle / reference:.2f} |"
        )


def measure_warm(case: Case, place: Path, stores: dict[str, Path], repeats: int, title: str) -> None:
    """Measure this reader with each codec beside the peers' fastest ways."""
    plain = open_cache(stores["none"], threads=THREADS)
    peers: list[Contender] = [SafetensorsShards(plain, place / "safetensors"), MappedRagged(plain, place / "ragged")]
    ours: list[Contender] = []
    for codec, store in stores.items():
        for verify in (True, False) if codec == "none" else (True,):
            for layout in ("stacked", "flat"):
                name = f"ours, {codec}, {layout}" + ("" if verify else ", checksums off")
                ours.append(Ours(name, open_cache(store, threads=THREADS, verify=verify), layout))
    contenders = [*peers, *ours]
    alternate(contenders, random_batches(len(case.lengths), 3), cold=False)
    batches = random_batches(len(case.lengths), repeats)
    rates = alternate(contenders, batches, cold=False)
    print_rates(title, rates, case, contenders, peers[0].name)
    default = open_cache(stores["default"], threads=THREADS)
    reference, mine = decode_reference(default), Ours("ours", default, "stacked")
    mine.batch(batches[0])
    pairs = [(reference(batch), _timed(mine, batch)) for batch in batches]
    ratio = statistics.median(plain for plain, _ in pairs) / statistics.median(ours for _, ours in pairs)
    print(f"\ncodec default against two plain threads decoding the same chunks: {ratio:.2f}x")


def _timed(contender: Contender, batch: Sequence[int]) -> float:
    started = time.perf_counter()
    contender.batch(batch)
    return time.perf_counter() - started


def measure_zarr(case: Case, stores: dict[str, Path], repeats: int) -> None:
    """Measure the same store through other Zarr implementations."""
    store = stores["default"]
    cache = open_cache(store, threads=THREADS)
    contenders: list[Contender] = [Ours("ours, default, flat", cache, "flat")]
    contenders += [ZarrPython(name, cache, store, pipeline) for name, pipeline in PIPELINES.items()]
    contenders += [TensorStoreReader(cache, store), DaskReader(cache, store)]
    alternate(contenders, random_batches(len(case.lengths), 1), cold=False)
    rates = alternate(contenders, random_batches(len(case.lengths), repeats), cold=False)
    print_rates(
        "The same store through other readers (codec default, warm)", rates, case, contenders, contenders[1].name
    )


def measure_cold(case: Case, place: Path, stores: dict[str, Path], repeats: int) -> None:
    """Measure with files dropped from the page cache before every batch."""
    plain = open_cache(stores["none"])
    contenders: list[Contender] = [
        SafetensorsShards(plain, place / "safetensors"),
        MappedRagged(plain, place / "ragged"),
        *(Ours(f"ours, {codec}, flat", open_cache(store), "flat") for codec, store in stores.items()),
    ]
    rates = alternate(contenders, random_batches(len(case.lengths), repeats), cold=True)
    print_rates("Ragged rows, cold (this machine's disk)", rates, case, contenders, contenders[0].name)


class Limited:
    """A contender whose bytes come over a line before it works on them in memory."""

    def __init__(self, contender: Contender, limit: RateLimit) -> None:
        self.name = contender.name
        self.files = contender.files
        self._contender = contender
        self._limit = limit

    def batch(self, samples: Sequence[int]) -> dict[str, object]:
        """See `Contender`."""
        self._limit.take(self._contender.stored_bytes(samples))
        return self._contender.batch(samples)

    def stored_bytes(self, samples: Sequence[int]) -> int:
        """See `Contender`."""
        return self._contender.stored_bytes(samples)

    def close(self) -> None:
        """See `Contender`."""
        self._contender.close()


def measure_limited(case: Case, place: Path, stores: dict[str, Path], repeats: int, rate: float) -> None:
    """Measure behind a line of ``rate`` bytes a second; our own reads go over it one by one."""
    plain = open_cache(stores["none"])
    limit = RateLimit(rate)
    contenders: list[Contender] = [
        Limited(SafetensorsShards(plain, place / "safetensors"), limit),
        Limited(MappedRagged(plain, place / "ragged"), limit),
    ]
    for codec, store in stores.items():
        contenders.append(Ours(f"ours, {codec}, flat", Cache(RateLimitedStorage(str(store), limit)), "flat"))
    rates = alternate(contenders, random_batches(len(case.lengths), repeats), cold=False)
    title = f"Ragged rows, storage limited to {rate / 1e6:.0f} MB/s"
    print_rates(title, rates, case, contenders, contenders[0].name)
    medians = [statistics.median(rates[contender.name]) for contender in contenders]
    ours = statistics.median(rates["ours, default, flat"])
    print(f"\ncodec default: {ours / medians[0]:.2f}x padded safetensors, {ours / medians[1]:.2f}x ragged rows")


def measure_layers(case: Case, store: Path) -> None:
    """Count the bytes that two captured layers read, against all five."""
    counts = []
    for layers in (None, [1, 3]):
        limit = RateLimit(float("inf"))
        cache = Cache(RateLimitedStorage(str(store), limit))
        for batch in random_batches(len(case.lengths), len(case.lengths) // BATCH):
            cache.read(batch, columns=("target_hidden_states",), layers=layers)
        counts.append(limit.total)
    print(f"\n2 of {LAYERS} layers: {counts[1]:,} of {counts[0]:,} bytes read, {counts[1] / counts[0]:.1%}")


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loaders", description=__doc__)
    parser.add_argument("--store", type=Path, help="a finished store with real states (default: synthetic ones)")
    parser.add_argument("--place", type=Path, help="directory to write in (default: a temporary one)")
    parser.add_argument("--width", type=int, default=2560, help="H of synthetic states (default: 2560)")
    parser.add_argument("--seq-length", type=int, default=1024, help="S of synthetic states (default: 1024)")
    parser.add_argument("--samples", type=int, default=64, help="samples (default: 64)")
    parser.add_argument("--repeats", type=int, default=15, help="batches a contender (default: 15)")
    parser.add_argument("--rate", type=float, default=200e6, help="limited storage, bytes a second (default: 200e6)")
    parser.add_argument("--quick", action="store_true", help="small states and few repeats")
    given = parser.parse_args(arguments)
    if given.quick:
        given.width, given.seq_length, given.samples, given.repeats = 256, 256, 32, 3
    torch.set_num_threads(THREADS)
    codecs = ("none", "fast", "default")
    with tempfile.TemporaryDirectory(dir=given.place) as temporary:
        place = Path(temporary)
        if given.store is None:
            full = synthetic_case(given.seq_length, given.width, given.samples, ragged=False)
            ragged = synthetic_case(given.seq_length, given.width, given.samples, ragged=True)
        else:
            full = ragged = stored_case(given.store, given.samples)
        source = "synthetic states" if given.store is None else f"real states of {given.store}"
        print(
            f"{source}: H={ragged.width}, K={LAYERS}, S={ragged.seq_length}, {len(ragged.lengths)} samples, "
            f"batch {BATCH}"
        )
        print(f"{os.cpu_count()} cores, torch {torch.__version__}, {THREADS} threads where not said otherwise")
        full_stores = {codec: write_case(full, codec, place / "full" / codec) for codec in codecs}
        measure_warm(full, place / "full", full_stores, given.repeats, "Full rows, warm")
        stores = {codec: write_case(ragged, codec, place / "half" / codec) for codec in codecs}
        measure_warm(ragged, place / "half", stores, given.repeats, "Ragged rows, warm")
        measure_zarr(ragged, stores, max(3, given.repeats // 3))
        measure_cold(ragged, place / "half", stores, max(3, given.repeats // 3))
        measure_limited(ragged, place / "half", stores, max(3, given.repeats // 3), given.rate)
        measure_layers(ragged, stores["default"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
