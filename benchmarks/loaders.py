"""Batches from disk: this reader with each codec beside the peers, on the same samples in one run.

``python -m benchmarks.loaders [--quick] [--store STORE] [--place DIR] [--json FILE]``. Every contender reads the same
random batches, alternating; figures are medians with their quartiles, rates of valid state bytes (K + 1 vectors a
token), and ratios. Warm means in the page cache; cold, after the files were dropped from it; limited, behind a line of
fixed rate. Writing is measured too, to the disk.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.costs import elapsed
from benchmarks.measure import default_setting
from benchmarks.peer_writing import ways_to_write
from benchmarks.peers import (
    PIPELINES,
    Contender,
    dask_reader,
    limited,
    mapped_ragged,
    ours,
    rate_table,
    safetensors_shards,
    tensorstore_reader,
    zarr_python,
)
from benchmarks.samples import Samples, stored_samples, synthetic_samples, write_samples
from benchmarks.storage import RateLimit, RateLimitedStorage, distinct_files, drop_from_cache
from benchmarks.tables import Column, PeerComparison, Recorder, Table, usable_cores
from dspark_store import Cache, CacheLoader, open_cache
from dspark_store.format.codecs import CRC_BYTES
from dspark_store.format.objects import Expected, open_object
from dspark_store.format.schema import LAST, StoreSchema
from dspark_store.format.storage import LocalStorage
from dspark_store.readers.fetch import Fetch

LAYERS, BATCH, SHARD_SIZE, THREADS, WRITES, EPOCHS = 5, 8, 16, 2, 3, 5
CODECS = ("none", "fast", "default")


def schema_of(samples: Samples, codec: str) -> StoreSchema:
    """Return the schema of a store of the samples with a codec and its default chunks."""
    return samples.schema(codec, default_setting(samples, codec).chunk_tokens, SHARD_SIZE)


def write_stores(samples: Samples, place: Path) -> dict[str, Path]:
    """Write a store with each codec; return their paths."""
    stores = {codec: place / codec for codec in CODECS}
    for codec, path in stores.items():
        write_samples(samples, schema_of(samples, codec), path, THREADS)
    return stores


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
        stored = open_object(cache.storage, item.key(shard), schema.states, expected)
        first = row * schema.states.chunks_per_row
        for slot in range(first, first + schema.states.chunks_of(int(cache.lengths[sample]))):
            begin, end = stored.tail.bounds[row, slot - first : slot - first + 2].tolist()
            data = stored.reader.read(begin, end - begin)
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
        decode = partial(pool.map, chain.compressor.decompress, chunks, cycle(scratch))
        return elapsed(lambda: list(decode())).clock

    return measure


def alternate(
    contenders: Sequence[Contender], batches: Sequence[Sequence[int]], *, cold: bool
) -> dict[str, list[float]]:
    """Time every contender on every batch, alternating; return samples per second, by name."""
    rates: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for batch in batches:
        for contender in contenders:
            if cold:
                contender.close()
                drop_from_cache(contender.files)
            time = elapsed(partial(contender.batch, batch))
            rates[contender.name].append(len(batch) / time.clock)
    return rates


def measure_warm(samples: Samples, place: Path, stores: Mapping[str, Path], repeats: int, title: str) -> Table:
    """Measure this reader with each codec beside the peers' fastest ways."""
    peers = layout_peers(stores, place)
    mine: list[Contender] = []
    for codec, store in stores.items():
        for verify in (True, False) if codec == "none" else (True,):
            for layout in ("stacked", "flat"):
                name = f"ours, {codec}, {layout}" + ("" if verify else ", checksums off")
                mine.append(ours(name, open_cache(store, threads=THREADS, verify=verify), layout))
    contenders = [*peers, *mine]
    alternate(contenders, random_batches(len(samples.lengths), 3), cold=False)
    batches = random_batches(len(samples.lengths), repeats)
    rates = alternate(contenders, batches, cold=False)
    default = open_cache(stores["default"], threads=THREADS)
    reference, reader = decode_reference(default), ours("ours", default, "stacked")
    reader.batch(batches[0])
    pairs = [(reference(batch), elapsed(partial(reader.batch, batch)).clock) for batch in batches]
    ratio = statistics.median(plain for plain, _ in pairs) / statistics.median(whole for _, whole in pairs)
    note = f"Codec default against two plain threads that decode the same chunks, in memory: {ratio:.2f}."
    table = read_table(title, rates, contenders, samples, peers[0].name, [note])
    plain = PeerComparison(title, "ours, default, stacked", "two plain threads decoding the same chunks", ratio)
    return Table(table.title, table.columns, table.rows, table.notes, (*table.comparisons, plain))


def layout_peers(stores: Mapping[str, Path], place: Path) -> list[Contender]:
    """Return the peers with a layout of their own; their files are made where they are not there yet."""
    plain = open_cache(stores["none"], threads=THREADS)
    return [safetensors_shards(plain, place / "safetensors"), mapped_ragged(plain, place / "ragged")]


def zarr_peers(store: Path) -> list[Contender]:
    """Return the other readers of a store of ours."""
    cache = open_cache(store, threads=THREADS)
    pipelines = [zarr_python(name, cache, store, pipeline) for name, pipeline in PIPELINES.items()]
    return [*pipelines, tensorstore_reader(cache, store), dask_reader(cache, store)]


def read_table(
    title: str,
    rates: Mapping[str, Sequence[float]],
    contenders: Sequence[Contender],
    samples: Samples,
    base: str,
    notes: Sequence[str] = (),
) -> Table:
    """Return the `rate_table` of reading."""
    count = len(samples.lengths)
    stored = {contender.name: contender.stored_bytes(range(count)) / count for contender in contenders}
    return rate_table(title, rates, stored, samples, base, notes)


def measure_zarr(samples: Samples, stores: Mapping[str, Path], repeats: int, title: str) -> Table:
    """Measure the same store through other Zarr implementations."""
    store = stores["default"]
    contenders = [ours("ours, default, flat", open_cache(store, threads=THREADS), "flat"), *zarr_peers(store)]
    alternate(contenders, random_batches(len(samples.lengths), 1), cold=False)
    rates = alternate(contenders, random_batches(len(samples.lengths), repeats), cold=False)
    return read_table(title, rates, contenders, samples, contenders[1].name)


def measure_cold(samples: Samples, place: Path, stores: Mapping[str, Path], repeats: int, title: str) -> Table:
    """Measure with files dropped from the page cache before every batch."""
    contenders: list[Contender] = [
        *layout_peers(stores, place),
        *(ours(f"ours, {codec}, flat", open_cache(store), "flat") for codec, store in stores.items()),
        *zarr_peers(stores["default"]),
    ]
    rates = alternate(contenders, random_batches(len(samples.lengths), repeats), cold=True)
    note = "Files are dropped from this machine's page cache before every batch; a host below it may still hold them."
    return read_table(title, rates, contenders, samples, contenders[0].name, [note])


def measure_limited(
    samples: Samples, place: Path, stores: Mapping[str, Path], repeats: int, rate: float, title: str
) -> Table:
    """Measure behind a line of ``rate`` bytes per second; our own reads go over it one by one."""
    limit = RateLimit(rate)
    peers = [*layout_peers(stores, place), *zarr_peers(stores["default"])]
    contenders: list[Contender] = [limited(peer, limit) for peer in peers]
    for codec, store in stores.items():
        contenders.append(ours(f"ours, {codec}, flat", Cache(RateLimitedStorage(store, limit)), "flat"))
    rates = alternate(contenders, random_batches(len(samples.lengths), repeats), cold=False)
    note = (
        "A peer's batch takes the longer one of its bytes over the line and its reading from memory, as if they "
        "overlapped wholly; ours really reads over the line."
    )
    title = f"{title}, storage of {rate / 1e6:.0f} MB/s"
    return read_table(title, rates, contenders, samples, contenders[0].name, [note])


def measure_writing(samples: Samples, place: Path, repeats: int, title: str) -> Table:
    """Write the samples in every way, in turn, each time into a new directory and to the disk."""
    ways = ways_to_write(samples, {codec: schema_of(samples, codec) for codec in CODECS}, THREADS)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    stored: dict[str, float] = {}
    for _ in range(repeats):
        for name, write in ways.items():
            rates[name].append(len(samples.lengths) / elapsed(partial(write, place / "written")).clock)
            stored[name] = sum(distinct_files(place / "written").values()) / len(samples.lengths)
            shutil.rmtree(place / "written")
    note = "Every way ends when its files are on the disk. Ours also writes checksums, digests, ledger and index."
    return rate_table(title, rates, stored, samples, "safetensors shards (NeMo)", [note])


def measure_epochs(samples: Samples, place: Path, stores: Mapping[str, Path], epochs: int, title: str) -> Table:
    """Measure whole epochs of the loader with its defaults, alternating with a peer and with its own requests alone."""
    storages: dict[str, Callable[[Path], LocalStorage]] = {
        "warm": LocalStorage,
        "cold": LocalStorage,
        "200 MB/s": lambda store: RateLimitedStorage(store, RateLimit(200e6)),
        "20 ms, 25 MB/s": lambda store: RateLimitedStorage(store, RateLimit(25e6, 0.02)),
    }
    peer = safetensors_shards(open_cache(stores["none"]), place / "safetensors")
    batches = random_batches(len(samples.lengths), len(samples.lengths) // BATCH)
    rates: dict[tuple[str, str], list[float]] = {}
    for where, storage in storages.items():
        ways: dict[str, Callable[[], object]] = {}
        if where in ("warm", "cold"):
            ways[peer.name] = lambda: [peer.batch(batch) for batch in batches]
        for codec, store in stores.items():
            for layout in ("stacked", "flat") if where == "warm" else ("flat",):
                loader = CacheLoader(
                    Cache(storage(store)), BATCH, layout=layout, min_supervised=0, dp_rank=0, dp_size=1
                )
                ways[f"ours, {codec}, {layout}"] = partial(_epoch, loader)
                ways[f"ours, {codec}, {layout}, requests alone"] = partial(_requests_alone, loader)
        for _ in range(epochs + 1):
            for name, way in ways.items():
                if where == "cold":
                    peer.close()  # what is mapped is not dropped
                    for files in (*stores.values(), peer.files):
                        drop_from_cache(files)
                clock = elapsed(way).clock
                rates.setdefault((where, name), []).append(len(batches) * BATCH / clock)
    found = {key: statistics.median(values[1:]) for key, values in rates.items()}
    columns = (Column("storage"), Column("contender"), Column("samples/s", ",.1f"), Column("of its requests alone"))
    rows = tuple(
        (where, name, rate, rate / found.get((where, f"{name}, requests alone"), rate))
        for (where, name), rate in found.items()
    )
    note = f"Medians of {epochs} epochs after the first one, contenders in turn."
    return Table(title, columns, rows, (note,))


def _epoch(loader: CacheLoader) -> None:
    for _ in loader:
        pass


def _requests_alone(loader: CacheLoader) -> None:
    with patch.object(Fetch, "decode", lambda _: None):
        _epoch(loader)


def measure_layers(samples: Samples, store: Path) -> Table:
    """Count the bytes that two captured layers read, against all five."""
    counts = []
    for layers in (None, [1, 3]):
        limit = RateLimit(float("inf"))
        cache = Cache(RateLimitedStorage(store, limit))
        for batch in random_batches(len(samples.lengths), len(samples.lengths) // BATCH):
            cache.read(batch, columns=("target_hidden_states",), layers=layers)
        counts.append(limit.total)
    columns = (Column("layers read"), Column("bytes read", ",d"), Column("of all", ".1%"))
    rows = tuple((name, count, count / counts[0]) for name, count in zip((f"all {LAYERS}", "2"), counts, strict=True))
    return Table("Some layers only, codec default", columns, rows)


def measure(samples: Samples, name: str, place: Path, given: argparse.Namespace, recorder: Recorder) -> None:
    """Measure everything on some samples, whose rows are called by ``name``."""
    few = max(3, given.repeats // 3)
    if given.epochs_only:
        stores = write_stores(samples, place)
        recorder.add(measure_epochs(samples, place, stores, EPOCHS, f"{name}, epochs of the loader"))
        return
    recorder.add(measure_writing(samples, place, min(few, WRITES), f"{name}, writing"))
    stores = write_stores(samples, place)
    recorder.add(measure_warm(samples, place, stores, given.repeats, f"{name}, warm"))
    recorder.add(measure_zarr(samples, stores, few, f"{name}, warm, the same store through other readers"))
    recorder.add(measure_cold(samples, place, stores, few, f"{name}, cold"))
    recorder.add(measure_limited(samples, place, stores, few, given.rate, name))
    recorder.add(measure_layers(samples, stores["default"]))


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loaders", description=__doc__)
    parser.add_argument("--store", type=Path, help="a finished store with real states (default: synthetic ones)")
    parser.add_argument("--place", type=Path, help="directory to write in (default: a temporary one)")
    parser.add_argument("--width", type=int, default=2560, help="H of synthetic states (default: 2560)")
    parser.add_argument("--seq-length", type=int, default=1024, help="S of synthetic states (default: 1024)")
    parser.add_argument("--samples", type=int, default=64, help="samples (default: 64)")
    parser.add_argument("--repeats", type=int, default=15, help="batches a contender (default: 15)")
    parser.add_argument("--rate", type=float, default=200e6, help="limited storage, bytes per second (default: 200e6)")
    parser.add_argument("--quick", action="store_true", help="small states and few repeats")
    parser.add_argument("--json", type=Path, help="file to write the outcome to")
    parser.add_argument("--epochs-only", action="store_true", help="measure whole epochs of the loader, and no more")
    given = parser.parse_args(arguments)
    if given.quick:
        given.width, given.seq_length, given.samples, given.repeats = 256, 256, 32, 3
    torch.set_num_threads(THREADS)
    recorder = Recorder("loaders", arguments)
    with tempfile.TemporaryDirectory(dir=given.place) as temporary:
        place = Path(temporary)
        if given.store is None:
            size = (given.seq_length, given.width, LAYERS, given.samples)
            full, samples = (synthetic_samples(*size, ragged=ragged) for ragged in (False, True))
        else:
            full, samples = None, stored_samples(given.store, count=given.samples, layers=LAYERS)
        source = "synthetic states" if given.store is None else "real states"
        recorder.describe(
            f"{source}: H={samples.width}, K={samples.layers}, S={samples.seq_length}, {len(samples.lengths)} samples, "
            f"{samples.dtype.name}, batches of {BATCH}; {usable_cores()} cores, {THREADS} threads for warm reading and "
            "writing"
        )
        if full is not None:
            stores = write_stores(full, place / "full")
            recorder.add(measure_epochs(full, place / "full", stores, EPOCHS, "Full rows, epochs of the loader"))
            if not given.epochs_only:
                recorder.add(measure_warm(full, place / "full", stores, given.repeats, "Full rows, warm"))
            shutil.rmtree(place / "full")
        measure(samples, "Ragged rows", place / "ragged", given, recorder)
    recorder.save(given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
