"""Whole epochs of the loader beside other readers and beside bounds of the same bytes; writing; some layers only.

Part of ``python -m benchmarks.loaders``.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.costs import elapsed, time_in_turn
from benchmarks.measure import default_setting
from benchmarks.peer_writing import ways_to_write
from benchmarks.peers import READERS, Contender, mapped_ragged, rate_table, safetensors_shards
from benchmarks.samples import Samples, write_samples
from benchmarks.storage import RateLimit, RateLimitedStorage, distinct_files, drop_from_cache
from benchmarks.tables import Column, PeerComparison, Recorder, Table, usable_cores
from dspark_store import Cache, CacheLoader, open_cache
from dspark_store.format.codecs import CRC_BYTES
from dspark_store.format.objects import Expected, open_object
from dspark_store.format.schema import LAST, StoreSchema
from dspark_store.format.storage import LocalStorage
from dspark_store.readers.fetch import Fetch
from dspark_store.readers.tensors import Layout

LAYERS, BATCH, SHARD_SIZE, WRITES, THREADS = 5, 8, 16, 2, usable_cores()
CODECS = ("none", "default")
LAYOUTS: tuple[Layout, ...] = ("stacked", "flat")

type Way = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Link:
    """What lies between a store and its readers; at most ``epochs`` are measured over it, after ``first`` ones."""

    name: str
    epochs: int
    first: int = 1
    line: tuple[float, float] | None = None
    """Bytes per second, and seconds by which each request is late."""
    cold: bool = False

    @property
    def warm(self) -> bool:
        """Whether everything is in the page cache."""
        return self.line is None and not self.cold

    def storage(self, store: Path) -> LocalStorage:
        """Return a store behind this link."""
        return LocalStorage(store) if self.line is None else RateLimitedStorage(store, RateLimit(*self.line))


WARM = "warm"
LINKS = (
    Link(WARM, 5),
    Link("cold", 3, cold=True),
    Link("200 MB/s", 3, line=(200e6, 0.0)),
    Link("20 ms, 25 MB/s", 1, 0, (25e6, 0.02)),
)


def schema_of(samples: Samples, codec: str) -> StoreSchema:
    """Return the schema of a store of the samples with a codec and its default chunks."""
    return samples.schema(codec, default_setting(samples, codec).chunk_tokens, SHARD_SIZE)


def write_stores(samples: Samples, place: Path) -> dict[str, Path]:
    """Write a store with each codec; return their paths."""
    stores = {codec: place / codec for codec in CODECS}
    for codec, path in stores.items():
        write_samples(samples, schema_of(samples, codec), path, THREADS)
    return stores


def measure(
    samples: Samples, name: str, place: Path, recorder: Recorder, epochs: int, *, epochs_only: bool = False
) -> None:
    """Measure everything on some samples, which are called by ``name``."""
    torch.set_num_threads(THREADS)
    if not epochs_only:
        recorder.add(measure_writing(samples, place, WRITES, f"{name}, writing"))
    stores = write_stores(samples, place)
    recorder.add(measure_epochs(samples, place, stores, epochs, name))
    if not epochs_only:
        recorder.add(measure_layers(samples, stores["default"], f"{name}, some layers only, codec default"))
    shutil.rmtree(place)


def measure_epochs(samples: Samples, place: Path, stores: Mapping[str, Path], epochs: int, name: str) -> Table:
    """Measure whole epochs of every contender over every link."""
    batches = _random_batches(len(samples.lengths))
    count = len(batches) * BATCH
    plain = open_cache(stores["none"])
    peers = [("none", safetensors_shards(plain, place / "safetensors")), ("none", mapped_ragged(plain, place / "rows"))]
    peers += [(codec, reader(store)) for codec, store in stores.items() for reader in READERS]
    rates: dict[tuple[str, str, str], float] = {}
    for link in LINKS:
        ways: dict[tuple[str, str], Way] = {}
        for codec, store in stores.items():
            ways |= {(codec, way): run for way, run in _ways_of_ours(link, codec, store, batches).items()}
        if link.line is None:
            ways |= {(codec, peer.name): partial(_clock, partial(_read_all, peer, batches)) for codec, peer in peers}
        if link.cold:
            files = [*stores.values(), *(peer.files for _, peer in peers)]
            ways = {name: partial(_cold, way, peers, files) for name, way in ways.items()}
        times = time_in_turn(ways, link.first + min(epochs, link.epochs))
        for (codec, way), seconds in times.items():
            rates[link.name, codec, way] = count / statistics.median(seconds[link.first :])
        if link.line is not None:
            rates |= {
                (link.name, codec, peer.name): count / _over_a_line(link.line, peer, batches, count / warm)
                for codec, peer in peers
                for warm in [rates[WARM, codec, peer.name]]
            }
    return _epochs_table(f"{name}, epochs", samples, rates)


def _ways_of_ours(link: Link, codec: str, store: Path, batches: Sequence[Sequence[int]]) -> dict[str, Way]:
    """Return the loader in each layout, its requests alone and, warm, what else bounds it."""
    ways: dict[str, Way] = {}
    for layout in LAYOUTS if link.warm else ("flat",):
        cache = Cache(link.storage(store))
        loader = CacheLoader(cache, BATCH, layout=layout, min_supervised=0, dp_rank=0, dp_size=1)
        ways[f"ours, {layout}"] = partial(_clock, partial(_epoch, loader))
        ways[f"requests alone, {layout}"] = partial(_clock, partial(_requests_alone, loader))
        if link.warm:
            ways[f"copy alone, {layout}"] = partial(_copy_alone, cache, len(batches), layout)
    if link.warm and codec != "none":
        ways["decode alone"] = partial(_decode_alone, open_cache(store), batches)
    return ways


def _epochs_table(title: str, samples: Samples, rates: Mapping[tuple[str, str, str], float]) -> Table:
    def ratio(link: str, codec: str, way: str) -> float | None:
        other = rates.get((link, codec, way.replace("ours", "requests alone"))) if way.startswith("ours") else None
        return None if other is None else rates[link, codec, way] / other

    columns = (
        *(Column(text) for text in ("storage", "codec", "contender")),
        Column("samples/s", ",.1f"),
        Column("GB/s of states"),
        Column("of its requests alone"),
    )
    rows = tuple((*key, rate, rate * samples.mean_bytes / 1e9, ratio(*key)) for key, rate in rates.items())
    comparisons = tuple(
        PeerComparison(f"{title}, {link}", f"{way}, codec {codec}", peer, rate / rates[link, of, peer])
        for (link, codec, way), rate in rates.items()
        if way.startswith("ours")
        for at, of, peer in rates
        if at == link and of in (codec, "none") and not peer.startswith(("ours", "requests", "copy", "decode"))
        if of == codec or "(" in peer  # with a layout of its own, which no codec of ours is in
    )
    note = (
        "Medians of the epochs after the first one, contenders in turn; ours are the loader's defaults. A peer is not "
        "run behind a line: its batch takes the longer one of its bytes over the line, as one request, and its time "
        "from the page cache, as if they overlapped wholly. Cold files are dropped from this machine's page cache "
        "before every epoch; a host below it may still hold them. Bounds of the same bytes, each on "
        f"{THREADS} threads: the loader's requests without decoding; copying decoded rows into a batch; decoding "
        "chunks that are in memory."
    )
    return Table(title, columns, rows, (note,), comparisons)


def _random_batches(samples: int) -> list[list[int]]:
    """Return an epoch of random batches."""
    order = np.random.Generator(np.random.PCG64(1)).permutation(samples)
    return [order[first : first + BATCH].tolist() for first in range(0, samples - BATCH + 1, BATCH)]


def _clock(action: Callable[[], object]) -> float:
    return elapsed(action).clock


def _cold(way: Way, peers: Sequence[tuple[str, Contender]], files: Sequence[Path]) -> float:
    for _, peer in peers:
        peer.close()  # what is mapped is not dropped
    for place in files:
        drop_from_cache(place)
    return way()


def _read_all(peer: Contender, batches: Sequence[Sequence[int]]) -> None:
    for batch in batches:
        peer.batch(batch)


def _over_a_line(
    line: tuple[float, float], peer: Contender, batches: Sequence[Sequence[int]], warm_seconds: float
) -> float:
    """Return the seconds of an epoch of which ``warm_seconds`` are work in memory."""
    rate, latency = line
    return sum(max(peer.stored_bytes(batch) / rate + latency, warm_seconds / len(batches)) for batch in batches)


def _epoch(loader: CacheLoader) -> None:
    for _ in loader:
        pass


def _requests_alone(loader: CacheLoader) -> None:
    with patch.object(Fetch, "decode", lambda _: None):
        _epoch(loader)


def _copy_alone(cache: Cache, batches: int, layout: Layout) -> float:
    """Return the seconds in which threads copy decoded rows, of other memory, into batches."""
    schema = cache.schema
    rows = np.ones((schema.num_layers + 1, BATCH, schema.seq_length, schema.hidden_size), schema.dtype.stored)
    stacked = layout == "stacked"
    shape = (BATCH, schema.num_layers, schema.seq_length, schema.hidden_size)
    made = np.ones(shape if stacked else (shape[0], shape[2], shape[1], shape[3]), rows.dtype)
    layers = made if stacked else made.swapaxes(1, 2)
    last = np.ones((BATCH, *shape[2:]), rows.dtype)
    targets = [*(layers[:, slot] for slot in range(schema.num_layers)), last]
    pairs = [(to[row], rows[place, row]) for place, to in enumerate(targets) for row in range(BATCH)]
    with ThreadPoolExecutor(THREADS) as pool:
        return _clock(lambda: [list(pool.map(lambda pair: np.copyto(*pair), pairs)) for _ in range(batches)])


def _decode_alone(cache: Cache, batches: Sequence[Sequence[int]]) -> float:
    """Return the seconds in which threads decode the chunks of batches, which are in memory."""
    schema, chain = cache.schema, cache.schema.chain(LAST)
    scratch = [np.empty((schema.chunk_tokens, schema.hidden_size), schema.dtype.stored) for _ in range(64)]
    seconds = 0.0
    with ThreadPoolExecutor(THREADS) as pool:
        for batch in batches:
            chunks = [chunk for sample in batch for chunk in _stored_chunks(cache, sample)]
            decode = partial(pool.map, chain.compressor.decompress, chunks, cycle(scratch))
            seconds += _clock(lambda decode=decode: list(decode()))  # type: ignore[misc]
    return seconds


def _stored_chunks(cache: Cache, sample: int) -> list[memoryview]:
    """Return the encoded chunks of a sample's distinct states, without their checksums."""
    schema = cache.schema
    shard, row = schema.tokens.locate(sample)
    chunks: list[memoryview] = []
    for item in schema.state_objects:
        if item.column != LAST and cache.index.is_shared(shard, item.slot):
            continue
        stored = open_object(
            cache.storage, item.key(shard), schema.states, Expected(cache.record.store_id, item.place(shard))
        )
        bounds = stored.tail.bounds[row].tolist()
        for begin, end in pairwise(bounds):
            if end > begin:
                chunks.append(memoryview(stored.reader.read(begin, end - begin))[:-CRC_BYTES])
        stored.reader.close()
    return chunks


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


def measure_layers(samples: Samples, store: Path, title: str) -> Table:
    """Count the bytes that two captured layers read, against all five."""
    counts = []
    for layers in (None, [1, 3]):
        limit = RateLimit(float("inf"))
        cache = Cache(RateLimitedStorage(store, limit))
        for batch in _random_batches(len(samples.lengths)):
            cache.read(batch, columns=("target_hidden_states",), layers=layers)
        counts.append(limit.total)
    columns = (Column("layers read"), Column("bytes read", ",d"), Column("of all", ".1%"))
    rows = tuple((name, count, count / counts[0]) for name, count in zip((f"all {LAYERS}", "2"), counts, strict=True))
    return Table(title, columns, rows)
