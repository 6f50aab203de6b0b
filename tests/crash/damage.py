"""Damage to a store's files, and all that can be read from a store: bytes, or the error that came instead."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from dspark_store import open_cache
from dspark_store.format.damage import Problem
from dspark_store.format.schema import COLUMNS, IDS, MASK
from dspark_store.format.shard import read_tail
from dspark_store.readers.cache import Cache
from dspark_store.readers.index import read_weights
from dspark_store.readers.verify import verify_store

type Name = tuple[str, int | None]
"""What was read: a column of one sample, or an array of the index or a table of weights (None)."""

_INDEX_READERS: dict[str, Callable[[Cache], bytes]] = {
    "index/length": lambda cache: cache.lengths.tobytes(),
    "index/supervised": lambda cache: cache.supervised.tobytes(),
    "index/digest": lambda cache: cache.index.digest.tobytes(),
    "index/status": lambda cache: cache.status.tobytes(),
}


@dataclass(frozen=True, slots=True)
class Flip:
    """One bit of one object."""

    key: str
    offset: int
    bit: int


@dataclass(frozen=True, slots=True)
class Reading:
    """All that a store gave: ``refused`` is why it did not open, ``values`` what was read, or the error of it."""

    refused: str
    values: dict[Name, bytes | str]
    problems: list[Problem]

    @property
    def failed(self) -> dict[Name, str]:
        return {name: value for name, value in self.values.items() if isinstance(value, str)}

    @property
    def messages(self) -> list[str]:
        problems = [str(problem) for problem in self.problems]
        return [*([self.refused] if self.refused else []), *self.failed.values(), *problems]


def read_everything(root: Path) -> Reading:
    """Open a store, read every column of every sample and every array, and verify it."""
    try:
        cache = open_cache(root)
    except (ValueError, OSError) as error:
        return Reading(str(error) or repr(error), {}, [])
    readers: dict[Name, Callable[[], bytes]] = {
        (column, sample): partial(_read_column, cache, column, sample)
        for sample in range(len(cache))
        for column in COLUMNS
    }
    readers |= {(path, None): partial(read, cache) for path, read in _INDEX_READERS.items()}
    readers["target", None] = partial(_read_weights, cache)
    values = {name: _value_or_error(read) for name, read in readers.items()}
    return Reading("", values, verify_store(cache))


def _value_or_error(read: Callable[[], bytes]) -> bytes | str:
    try:
        return read()
    except (ValueError, OSError) as error:
        return str(error)


def _read_column(cache: Cache, column: str, sample: int) -> bytes:
    return _bytes(cache.read([sample], columns=(column,))[column])


def _read_weights(cache: Cache) -> bytes:
    weights = read_weights(cache.storage, cache.record)
    return _bytes(weights.embed) + _bytes(weights.head)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def kind_of(key: str) -> str:
    """Return what sort of object stands at a key; flips are drawn in equal shares from each."""
    if key.endswith("zarr.json"):
        return "root" if key == "zarr.json" else "metadata"
    return key.partition("/c.")[0]


def flips_of_all_kinds(root: Path, count: int, seed: int) -> list[Flip]:
    """Draw about ``count`` flips: the same number of every kind of object, of its objects and bits uniformly."""
    rng = random.Random(seed)
    kinds: dict[str, list[str]] = {}
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        key = str(path.relative_to(root))
        kinds.setdefault(kind_of(key), []).append(key)
    drawn = []
    for turn in range(count):
        keys = list(kinds.values())[turn % len(kinds)]
        key = rng.choices(keys, [(root / key).stat().st_size for key in keys])[0]
        drawn.append(Flip(key, rng.randrange((root / key).stat().st_size), rng.randrange(8)))
    return drawn


@contextmanager
def flipped(root: Path, flip: Flip) -> Iterator[None]:
    """Flip a bit in place, so that an object with two names is hit under both, and flip it back."""
    _toggle(root / flip.key, flip)
    try:
        yield
    finally:
        _toggle(root / flip.key, flip)


def _toggle(path: Path, flip: Flip) -> None:
    with path.open("r+b") as file:
        file.seek(flip.offset)
        (byte,) = file.read(1)
        file.seek(flip.offset)
        file.write(bytes([byte ^ 1 << flip.bit]))


def samples_hit(cache: Cache, flip: Flip) -> set[Name]:
    """Return the columns and samples that cannot be read while a bit of a column's object is flipped.

    A bit of a chunk hits its sample; one of the tail (trailer and index) all samples of the shard. The shared last
    layer is read under both of its names.
    """
    column, _, name = flip.key.partition("/")
    shard = int(name.split(".")[1])
    grid = cache.schema.tokens if column in (IDS, MASK) else cache.schema.states
    reader = cache.storage.open(flip.key)
    tail = read_tail(reader, grid)
    reader.close()
    begins, ends = tail.bounds[:, :-1].ravel(), tail.bounds[:, 1:].ravel()
    slots = [slot for slot in range(grid.slots) if begins[slot] <= flip.offset < ends[slot]]
    rows = grid.rows(shard)
    samples = [rows.start + slot // grid.chunks_per_row for slot in slots] or list(rows)
    return {(place.column, sample) for place in tail.label.places for sample in samples}
