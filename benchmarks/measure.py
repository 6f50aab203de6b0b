"""One setting of a store's chunks: what it is, its store on disk, and batches read from that in every way."""

from __future__ import annotations

import importlib.util
import math
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch

from benchmarks.costs import elapsed
from benchmarks.samples import Samples, write_samples
from benchmarks.storage import RateLimit, RateLimitedStorage, distinct_files
from dspark_store import Cache
from dspark_store.format.codecs import CODEC_PRESETS
from dspark_store.format.grid import default_chunk_tokens
from dspark_store.format.objects import Expected, open_object
from dspark_store.format.schema import IDS, LAYERS, MASK
from dspark_store.readers.plan import SampleSpan
from dspark_store.readers.ranges import DEFAULT_OPEN_OBJECTS
from dspark_store.readers.tensors import batch_shape, column_dtype

BATCH, SPAN = 8, 128
ACCESSES = {
    "sample": "random whole samples, all layers, in batches",
    "scattered": "the same, every object opened anew, as in a store of far more objects than are kept open",
    "span": f"random spans of {SPAN} positions, all layers, in batches",
    "sequential": "whole samples in the order of the store, all layers, in batches",
    "layer": "one layer of random whole samples, in batches",
}
_OPENS = 15
DEFAULT_SHARD_SIZE = 256
"""The default of ``--shard-size``."""


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """How states are cut and encoded: the codec preset, T tokens and L layers per chunk, R samples per shard."""

    codec: str
    chunk_tokens: int
    shard_size: int
    layers: int = 1

    def __str__(self) -> str:
        layers = "" if self.layers == 1 else f", {self.layers} layers per chunk"
        return f"{self.codec}, T={self.chunk_tokens}, R={self.shard_size}{layers}"

    @property
    def flags(self) -> str:
        """The flags of the precompute. It keeps one layer a chunk; ValueError for any other number."""
        if self.layers != 1:
            raise ValueError(f"the precompute keeps one layer a chunk, not {self.layers}")
        return f"--codec {self.codec} --chunk-tokens {self.chunk_tokens} --shard-size {self.shard_size}"


@dataclass(frozen=True, slots=True)
class Axes:
    """The values of each axis, ascending; codecs in the order of the presets."""

    codecs: tuple[str, ...]
    chunk_tokens: tuple[int, ...]
    shard_sizes: tuple[int, ...]
    layers: tuple[int, ...]

    def settings(self, *, layers: int | None = None) -> list[Setting]:
        """Return every combination, or those with ``layers`` layers per chunk."""
        wanted = self.layers if layers is None else (layers,)
        return [Setting(*axes) for axes in product(self.codecs, self.chunk_tokens, self.shard_sizes, wanted)]


def default_setting(samples: Samples, codec: str = "default") -> Setting:
    """Return what the precompute takes for these samples when nothing is said."""
    tokens = default_chunk_tokens(samples.width, samples.dtype.itemsize, samples.seq_length, compressed=codec != "none")
    return Setting(codec, tokens, DEFAULT_SHARD_SIZE)


def default_axes(samples: Samples, *, quick: bool) -> Axes:
    """Return the axes of a sweep: T doubles up to S, with the defaults of the precompute on every axis.

    Codec dense is left out where its package is not installed, and of a quick sweep.
    """
    length = samples.seq_length
    tried = (64, 256) if quick and length > 64 else [1 << power for power in range(4 if length < 64 else 5, 12)]
    tokens = {value for value in tried if value < length}
    tokens |= {default_setting(samples, codec).chunk_tokens for codec in ("none", "default")}
    dense = importlib.util.find_spec("pcodec") is not None and not quick
    codecs = tuple(codec for codec in CODEC_PRESETS if codec != "dense" or dense)
    shards = (16, DEFAULT_SHARD_SIZE) if quick else (16, 64, DEFAULT_SHARD_SIZE)
    return Axes(codecs, tuple(sorted(tokens)), shards, tuple(sorted({1, samples.layers})))


def chosen_axes(axes: Axes, given: Axes, samples: Samples) -> Axes:
    """Return the axes with those of ``given`` that are not empty in their place.

    ValueError when a value cannot be: T above S, or layers per chunk that do not divide K.
    """
    numbers = ("chunk_tokens", "shard_sizes", "layers")
    sizes: list[tuple[int, ...]] = [tuple(sorted(getattr(given, name))) or getattr(axes, name) for name in numbers]
    chosen = Axes(given.codecs or axes.codecs, *sizes)
    for tokens in chosen.chunk_tokens:
        if not 1 <= tokens <= samples.seq_length:
            raise ValueError(f"--chunk-tokens {tokens} is outside 1 to {samples.seq_length}, the positions of a sample")
    for layers in chosen.layers:
        if layers < 1 or samples.layers % layers:
            raise ValueError(f"--layers-per-chunk {layers} does not divide the {samples.layers} layers of the samples")
    if min(chosen.shard_sizes) < 1:
        raise ValueError(f"--shard-size must be >= 1, got {min(chosen.shard_sizes)}")
    if 1 not in chosen.layers:
        raise ValueError("--layers-per-chunk must have 1 in it, which is what the format keeps")
    return chosen


@dataclass(frozen=True, slots=True)
class Request:
    """One batch: its spans, ``positions`` long, and the layer that is wanted of them, or None for all."""

    spans: tuple[SampleSpan, ...]
    positions: int
    layer: int | None = None

    @property
    def valid(self) -> int:
        """Positions that are of a sample, and not padding."""
        return sum(span.stop - span.start for span in self.spans)

    def wanted_bytes(self, samples: Samples) -> int:
        """Return the bytes of states that were asked for, without padding."""
        return self.valid * samples.vector_bytes * (samples.layers if self.layer is None else 1)


def requests(access: str, samples: Samples, batches: int) -> list[Request]:
    """Return the batches of an access pattern."""
    generator = np.random.Generator(np.random.PCG64(2))
    count, size = len(samples.lengths), min(BATCH, len(samples.lengths))
    order: list[int] = []
    while len(order) < batches * size:
        order += range(count) if access == "sequential" else generator.permutation(count).tolist()
    made = []
    for at in range(batches):
        rows = order[at * size : (at + 1) * size]
        starts, most = [0] * size, samples.seq_length
        if access == "span":
            starts, most = [int(generator.integers(0, max(1, samples.lengths[row] - SPAN + 1))) for row in rows], SPAN
        stops = [min(samples.lengths[row], start + most) for row, start in zip(rows, starts, strict=True)]
        longest = max(stop - start for start, stop in zip(starts, stops, strict=True))
        spans = (
            SampleSpan(row, start, stop, batch, 0, longest)
            for batch, (row, start, stop) in enumerate(zip(rows, starts, stops, strict=True))
        )
        made.append(Request(tuple(spans), longest, at % samples.layers if access == "layer" else None))
    return made


@dataclass(frozen=True, slots=True)
class Opening:
    """What it takes to open a store, and one object of it with its tail: milliseconds, and the bytes of the tail."""

    store_ms: float
    object_ms: float
    object_bytes: int


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting's store of some samples, in ``place``, whose encoding takes ``threads`` threads.

    ``samples`` are grouped already, as the setting has it.
    Several layers per chunk are a store of fewer, wider layers: the same writer, codec and reader see chunks of L times
    the features. Reading one layer of it reads them all; each batch lands stacked, where a decoded chunk fits in one
    piece, which for all layers in one chunk is the flat layout as well.
    """

    samples: Samples
    setting: Setting
    place: Path
    threads: int

    def write(self) -> float:
        """Write the store, in the place of an older one; return the seconds that its states took."""
        shutil.rmtree(self.place, ignore_errors=True)
        schema = self.samples.schema(self.setting.codec, self.setting.chunk_tokens, self.setting.shard_size)
        return write_samples(self.samples, schema, self.place, self.threads).clock

    @property
    def files(self) -> dict[int, int]:
        """The bytes of each object of the four columns; one that stands at two places counts once."""
        return distinct_files(self.place, "*/c.*")

    @contextmanager
    def opened(self, access: str, bytes_per_second: float = float("inf")) -> Iterator[Reading]:
        """Open the store, with all its objects; ``scattered``, every object is opened anew by each batch.

        What is read from then on comes over a line of this rate.
        """
        scattered = access == "scattered"
        line = RateLimit(float("inf"))
        open_objects = 1 if scattered else max(DEFAULT_OPEN_OBJECTS, 2 * len(self.files))
        with closing(Cache(RateLimitedStorage(self.place, line), open_objects=open_objects)) as cache:
            reading = Reading(cache, self.setting, line, scattered=scattered)
            reading.warm_up(self.samples.lengths)
            line.reset(bytes_per_second)
            yield reading

    def opening(self) -> Opening:
        """Measure opening the store, and an object of it."""
        stores, objects = [], []
        line = RateLimit(float("inf"))
        for _ in range(_OPENS):
            started = time.perf_counter()
            cache = Cache(RateLimitedStorage(self.place, line))
            _ = cache.lengths, cache.index.object_record(0, 0)
            stores.append(time.perf_counter() - started)
            schema, item = cache.schema, cache.schema.state_objects[0]
            expected = Expected(cache.record.store_id, item.place(0), cache.index.object_record(0, 3))
            line.reset()
            started = time.perf_counter()
            open_object(cache.storage, item.key(0), schema.states, expected).reader.close()
            objects.append(time.perf_counter() - started)
        return Opening(statistics.median(stores) * 1e3, statistics.median(objects) * 1e3, line.total)


class Reading:
    """An open store: reads requests into memory that is used again, and counts the bytes that it reads."""

    def __init__(self, cache: Cache, setting: Setting, line: RateLimit, *, scattered: bool) -> None:
        self._cache = cache
        self._setting = setting
        self._line = line
        self._scattered = scattered
        self._memory: dict[str, torch.Tensor] = {}

    def warm_up(self, lengths: Sequence[int]) -> None:
        """Read a position of a row of each shard, so that files, pages and threads are there."""
        grid = self._cache.schema.tokens
        rows = [next((row for row in grid.rows(shard) if lengths[row]), None) for shard in range(grid.num_shards)]
        self.read_all([Request((SampleSpan(row, 0, 1, 0, 0, 1),), 1) for row in rows if row is not None])

    def read(self, request: Request) -> dict[str, torch.Tensor]:
        """Read one batch; its tensors are overwritten by the next one.

        Scattered, its samples are read one by one, as if no two of them stood in the same shard.
        """
        slots: Sequence[int] = range(self._cache.schema.num_layers)
        if request.layer is not None:
            slots = [request.layer // self._setting.layers]
        batch = self._batch(request, len(slots))
        if not self._scattered:
            self._cache.reader.read(request.spans, slots, batch)
            return batch
        for span in request.spans:
            row = {name: values[span.batch : span.batch + 1] for name, values in batch.items()}
            self._cache.reader.read([span._replace(batch=0)], slots, row)
        return batch

    def _batch(self, request: Request, slots: int) -> dict[str, torch.Tensor]:
        """Return tensors in memory that is used again, as a loader's; states are (B, slots, positions, H)."""
        schema, batch = self._cache.schema, {}
        for name in (LAYERS, IDS, MASK):
            shape = batch_shape(schema, name, len(request.spans), slots, request.positions, "stacked")
            size = math.prod(shape)
            if name not in self._memory or self._memory[name].numel() < size:
                self._memory[name] = torch.zeros(size, dtype=column_dtype(schema, name))
            batch[name] = self._memory[name][:size].view(shape)
        return batch

    def read_all(self, wanted: Sequence[Request]) -> None:
        """Read some batches one after the other."""
        for request in wanted:
            self.read(request)

    def seconds(self, wanted: Sequence[Request]) -> float:
        """Return the time that some batches take."""
        return elapsed(lambda: self.read_all(wanted)).clock

    def bytes_read(self, wanted: Sequence[Request]) -> int:
        """Return the bytes that some batches read, of states and tokens."""
        before = self._line.total
        self.read_all(wanted)
        return self._line.total - before
