"""One setting tried: its store on disk, and batches read from it."""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.access import Request
from benchmarks.samples import Samples, write_samples
from benchmarks.setting import Setting
from benchmarks.storage import RateLimit, RateLimitedStorage
from dspark_store import Cache
from dspark_store.format.objects import Expected, open_object
from dspark_store.format.schema import IDS, LAYERS, MASK
from dspark_store.format.storage import LocalStorage
from dspark_store.readers.fetch import DEFAULT_OPEN_OBJECTS
from dspark_store.readers.plan import SampleSpan
from dspark_store.readers.tensors import batch_shape, column_dtype

_OPENS = 15


class Memory:
    """Memory of batches that is used again, as a loader's blocks are."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def batch(self, cache: Cache, request: Request, slots: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a batch; its states are (B, slots, positions, H)."""
        shapes = {
            name: batch_shape(cache.schema, name, len(request.spans), slots, request.positions, "stacked")
            for name in (LAYERS, IDS, MASK)
        }
        dtypes = {name: column_dtype(cache.schema, name) for name in shapes}
        sizes = {name: -(-math.prod(shape) * dtypes[name].itemsize // 64) * 64 for name, shape in shapes.items()}
        if self._bytes.numel() < sum(sizes.values()):
            self._bytes = torch.zeros(sum(sizes.values()), dtype=torch.uint8)
        at, made = 0, {}
        for name, shape in shapes.items():
            nbytes = math.prod(shape) * dtypes[name].itemsize
            made[name] = self._bytes[at : at + nbytes].view(dtypes[name]).view(shape)
            at += sizes[name]
        return made


@dataclass(frozen=True, slots=True)
class Opening:
    """What it takes to open a store, and one object of it with its tail: milliseconds, and the bytes of the tail."""

    store_ms: float
    object_ms: float
    object_bytes: int


class Trial:
    """A setting's store of some samples, in ``place``.

    Several layers a chunk are a store of fewer, wider layers: the same writer, codec and reader see chunks of L times
    the features. Reading one layer of it reads them all; each batch lands stacked, where a decoded chunk fits in one
    piece, which for all layers in one chunk is the flat layout as well.
    """

    def __init__(self, samples: Samples, setting: Setting, place: Path, threads: int) -> None:
        """``samples`` are grouped already, as the setting has it; encoding takes ``threads`` threads."""
        self.samples = samples
        self.setting = setting
        self.place = place
        self._threads = threads
        self._schema = samples.schema(setting.codec, setting.chunk_tokens, setting.shard_size)

    def write(self) -> float:
        """Write the store, in the place of an older one; return the seconds that its states took."""
        if self.place.exists():
            shutil.rmtree(self.place)
        return write_samples(self.samples, self._schema, self.place, self._threads).clock

    @property
    def stored_bytes(self) -> int:
        """Bytes of all objects, tokens included; one that stands at two places counts once."""
        cache = Cache(LocalStorage(self.place))
        return sum(cache.index.shard_bytes(shard) for shard in range(self._schema.tokens.num_shards))

    @property
    def objects(self) -> int:
        """Objects of the four columns: files, but for the second names of those that stand at two places."""
        return len({path.stat().st_ino for path in self.place.glob("*/c.*")})

    @contextmanager
    def opened(self, access: str, bytes_per_second: float = float("inf")) -> Iterator[Reading]:
        """Open the store, with all its objects; ``scattered``, every object is opened anew by each batch.

        What is read from then on comes over a line of this rate.
        """
        scattered = access == "scattered"
        line = RateLimit(float("inf"))
        storage = RateLimitedStorage(self.place, line)
        cache = Cache(storage, open_objects=1 if scattered else max(DEFAULT_OPEN_OBJECTS, 2 * self.objects))
        reading = Reading(cache, self.setting, line, scattered=scattered)
        try:
            reading.warm_up(self.samples.lengths)
            line.reset(bytes_per_second)
            yield reading
        finally:
            cache.close()

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
        self._memory = Memory()

    def warm_up(self, lengths: Sequence[int]) -> None:
        """Read a position of a row of each shard, so that files, pages and threads are there."""
        grid = self._cache.schema.tokens
        rows = [next((row for row in grid.rows(shard) if lengths[row]), None) for shard in range(grid.num_shards)]
        for row in rows:
            if row is not None:
                self.read(Request((SampleSpan(row, 0, 1, 0, 0, 1),), 1))

    def read(self, request: Request) -> dict[str, torch.Tensor]:
        """Read one batch; its tensors are overwritten by the next one.

        Scattered, its samples are read one by one, as if no two of them stood in the same shard.
        """
        slots = range(self._cache.schema.num_layers)
        if request.layer is not None:
            slots = range(request.layer // self._setting.layers, request.layer // self._setting.layers + 1)
        batch = self._memory.batch(self._cache, request, len(slots))
        if not self._scattered:
            self._cache.reader.read(request.spans, slots, batch)
            return batch
        for span in request.spans:
            row = {name: values[span.batch : span.batch + 1] for name, values in batch.items()}
            self._cache.reader.read([span._replace(batch=0)], slots, row)
        return batch

    def seconds(self, wanted: Sequence[Request]) -> float:
        """Return the time that some batches take."""
        started = time.perf_counter()
        for request in wanted:
            self.read(request)
        return time.perf_counter() - started

    def bytes_read(self, wanted: Sequence[Request]) -> int:
        """Return the bytes that some batches read, of states and tokens."""
        before = self._line.total
        for request in wanted:
            self.read(request)
        return self._line.total - before
