"""One random fault in a finished store: of a named kind, the same for the same seed, and never none at all."""

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from dspark_store.format.arrays import pack_array
from dspark_store.format.manifest import ATTRIBUTE, parse_record
from dspark_store.format.metadata import ROOT_KEY
from dspark_store.format.schema import ArraySpec, metadata_bytes
from dspark_store.format.storage import LocalStorage
from tests.crash.damage import kind_of
from tests.stores import Shape, build_store, reseal


class FaultKind(StrEnum):
    """What can happen to a store on its disk, or under somebody's hands."""

    FLIP = "a flipped bit"
    TRUNCATE = "a truncated object"
    DELETE = "a deleted object"
    SWAP = "two objects swapped"
    FOREIGN = "an object of another run"
    STALE_ROW = "a stale ledger row"
    EDITED_INDEX = "an edited index column"
    EDITED_JSON = "an edited zarr.json"


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done: ``keys`` are all objects that are not as before, ``shards`` those that it is about.

    ``what`` says it in words.
    """

    kind: FaultKind
    keys: tuple[str, ...]
    shards: frozenset[int]
    what: str


type Change = tuple[list[str], list[int | None], str]
"""Keys of objects that are not as before, shards that it is about, and what was done in words."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A good store, and finished stores of other runs with the same shape: other tokens, another target, another id."""

    name: str
    path: Path
    others: tuple[Path, ...]


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"codec": "none"},
    "sources": {"sources": ("chats", "code", "papers"), "tied": True},
    "bias": {"bias": True, "dtype": "fp32", "spoiled": 4},
    "not shared": {"shared_last": False, "codec": "fast", "dtype": "fp16"},
    "two weight chunks": {"shape": Shape(vocab=300_000), "lengths": (3, 9, 20, 1)},
    "empty samples": {"lengths": (0, 20, 8, 0), "codec": "dense"},
}


def build_victims(place: Path, names: Sequence[str] = tuple(SHAPES)) -> list[Victim]:
    """Build the stores that faults are planted into."""
    runs: dict[str, dict[str, Any]] = {
        "corpus": {"corpus": 1},
        "target": {"target": 1},
        "identity": {"corpus": 1, "target": 1, "fields": {"store_id": "f" * 32}},
    }
    victims = []
    for number, name in enumerate(names):
        path = build_store(place / f"{number}", **SHAPES[name]).path
        others = [build_store(place / f"{number}-{run}", **SHAPES[name], **more).path for run, more in runs.items()]
        victims.append(Victim(name, path, tuple(others)))
    return victims


def copy_store(store: Path, to: Path, *, links: bool = True) -> Path:
    """Copy a store; with ``links``, objects that share their bytes do so in the copy too."""
    names: dict[int, Path] = {}

    def copied(source: str, target: str) -> None:
        inode = Path(source).stat().st_ino
        if links and inode in names:
            Path(target).hardlink_to(names[inode])
        else:
            shutil.copyfile(source, target)
        names.setdefault(inode, Path(target))

    return Path(shutil.copytree(store, to, copy_function=copied))


def plant(root: Path, kind: FaultKind, seed: int, others: Sequence[Path] = ()) -> Fault:
    """Plant a fault of a kind into the store at ``root``, and tell what it was.

    ``others`` are finished stores of the same shape and of other runs.
    """
    return _Planter(root, random.Random(f"{kind.name} {seed}"), others).plant(kind)


class _Planter:
    def __init__(self, root: Path, rng: random.Random, others: Sequence[Path]) -> None:
        self.root = root
        self.rng = rng
        self.others = others
        files = sorted(path for path in root.rglob("*") if path.is_file() and not path.name.startswith("."))
        self.keys = [str(path.relative_to(root)) for path in files]
        self.names: dict[int, list[str]] = {}
        for key, path in zip(self.keys, files, strict=True):
            self.names.setdefault(path.stat().st_ino, []).append(key)

    def plant(self, kind: FaultKind) -> Fault:
        maker: Callable[[], Change] = getattr(self, kind.name.lower())
        keys, shards, what = maker()
        known = [*shards, *(shard_of(key) for key in keys)]
        return Fault(kind, tuple(keys), frozenset(shard for shard in known if shard is not None), what)

    def read(self, key: str) -> bytes:
        return (self.root / key).read_bytes()

    def replace(self, key: str, data: bytes) -> None:
        """Put other bytes under this name only."""
        assert not (self.root / key).exists() or self.read(key) != data
        (self.root / key).unlink(missing_ok=True)
        (self.root / key).write_bytes(data)

    def damage(self, key: str, data: bytes) -> list[str]:
        """Change an object's bytes where they lie, under all of its names, or under one, as a bad copy would."""
        assert self.read(key) != data
        names = self.names[(self.root / key).stat().st_ino]
        if len(names) > 1 and self.rng.random() < 0.5:
            self.replace(key, data)
            return [key]
        (self.root / key).write_bytes(data)
        return names

    def any_key(self, keys: Sequence[str] | None = None) -> str:
        """Return an object: every kind of them with the same chance."""
        kinds: dict[str, list[str]] = {}
        for key in self.keys if keys is None else keys:
            kinds.setdefault(kind_of(key), []).append(key)
        return self.rng.choice(kinds[self.rng.choice(sorted(kinds))])

    def flip(self) -> Change:
        key = self.any_key([key for key in self.keys if (self.root / key).stat().st_size])
        data = bytearray(self.read(key))
        chunks = data.find(b"DSPKTRLR")  # in small objects most bytes are of the tail: as often, take one of a chunk
        offset = self.rng.randrange(chunks if chunks > 0 and self.rng.random() < 0.5 else len(data))
        bit = self.rng.randrange(8)
        data[offset] ^= 1 << bit
        return self.damage(key, bytes(data)), [], f"bit {bit} of byte {offset} of {key} flipped"

    def truncate(self) -> Change:
        key = self.any_key()
        data = self.read(key)
        size = self.rng.choice([0, len(data) - 1, self.rng.randrange(len(data))])
        return self.damage(key, data[:size]), [], f"{key} cut from {len(data)} to {size} bytes"

    def delete(self) -> Change:
        key = self.any_key()
        (self.root / key).unlink()
        return [key], [], f"{key} deleted"

    def swap(self) -> Change:
        one = self.any_key([key for key in self.keys if key != ROOT_KEY])
        alike = self.rng.random() < 0.5  # of the same column or array kind, so that sizes may be the same
        family = kind_of(one).partition("/")[0]
        rivals = [
            key
            for key in self.keys
            if self.read(key) != self.read(one)
            and key != ROOT_KEY
            and (not alike or kind_of(key).partition("/")[0] == family)
        ]
        other = self.rng.choice(rivals or [key for key in self.keys if self.read(key) != self.read(one)])
        first, second = self.read(one), self.read(other)
        self.replace(one, second)
        self.replace(other, first)
        return [one, other], [], f"{one} and {other} swapped"

    def foreign(self) -> Change:
        run = self.rng.choice(self.others)
        differing = [key for key in self.keys if (run / key).exists() and (run / key).read_bytes() != self.read(key)]
        key = self.any_key(differing)
        self.replace(key, (run / key).read_bytes())
        return [key], [], f"{key} taken from {run.name}"

    def stale_row(self) -> Change:
        rows = [key for key in self.keys if key.startswith(("ledger/tokens/c.", "ledger/states/c."))]
        key = self.rng.choice(rows)
        directory = key.partition("/c.")[0]
        how = self.rng.choice(["another run", "another shard", "edited", "past the end"])
        runs = [run for run in self.others if (run / key).read_bytes() != self.read(key)]
        if how == "another run" and runs:
            run = self.rng.choice(runs)
            self.replace(key, (run / key).read_bytes())
            return [key], [], f"{key} taken from {run.name}"
        neighbours = [row for row in rows if row.startswith(directory) and self.read(row) != self.read(key)]
        if how == "another shard" and neighbours:
            other = self.rng.choice(neighbours)
            self.replace(key, self.read(other))
            return [key], [], f"{key} is now that of {other}"
        if how == "past the end":
            past = f"{directory}/c.{1 + max(shard_of(row) or 0 for row in rows) + self.rng.randrange(3)}.0.0"
            self.replace(past, self.read(key))
            return [past], [], f"{past} added"
        row = np.frombuffer(self.read(key)[:-4], "<u8").copy()
        place = self.rng.randrange(row.size)
        row[place] += np.uint64(self.rng.randrange(1, 1000))
        self.replace(key, pack_array(row))
        return [key], [], f"field {place} of {key} edited"

    def edited_index(self) -> Change:
        """Edit a value and mend the object's checksum; as often, the checksum in the root and the seal too."""
        record = parse_record(self.root_attributes(), "a test")
        specs: dict[str, ArraySpec] = {**record.schema.token_index(), **record.schema.final_index()}
        path = self.rng.choice(sorted(specs))
        (key,) = [key for key in self.keys if key.startswith(f"{path}/c.")]
        values = np.frombuffer(self.read(key)[:-4], specs[path].data_type).copy()
        place = self.rng.randrange(values.size)
        values[place] ^= values.dtype.type(1 << self.rng.randrange(3))
        self.replace(key, pack_array(values))
        sealed = self.rng.random() < 0.5
        if sealed:
            self.seal_again(path, key)
        fields = values.size // specs[path].shape[0]
        shard = place // fields // (1 if path == "index/objects" else record.schema.shard_size)
        return [key], [shard], f"value {place} of {path} edited{', and sealed again' if sealed else ''}"

    def seal_again(self, path: str, key: str) -> None:
        root = json.loads(self.read(ROOT_KEY))
        root["attributes"][ATTRIBUTE]["checksums"][path] = hashlib.blake2b(self.read(key), digest_size=16).hexdigest()
        self.replace(ROOT_KEY, metadata_bytes(root))
        reseal(LocalStorage(self.root))

    def root_attributes(self) -> dict[str, Any]:
        attributes: dict[str, Any] = json.loads(self.read(ROOT_KEY))["attributes"][ATTRIBUTE]
        return attributes

    def edited_json(self) -> Change:
        key = self.any_key([key for key in self.keys if key.endswith(ROOT_KEY)])
        text = self.read(key)
        document = json.loads(text)
        how = self.rng.choice(["a value", "a value", "a field removed", "a field added", "spelled otherwise"])
        if how == "spelled otherwise":
            spellings = [json.dumps(document).encode(), text + b"\n", text.replace(b": ", b":  ", 1)]
            if b"1e-06" in text:
                spellings.append(text.replace(b"1e-06", b"1E-06"))
            edited = self.rng.choice(spellings)
        else:
            self.edit_json(document, how)
            edited = metadata_bytes(document)
        self.replace(key, edited)
        return [key], [], f"{key} edited: {how}"

    def edit_json(self, document: Any, how: str) -> None:
        containers = [value for value in _walk(document) if isinstance(value, dict | list) and value]
        if how == "a field added":
            self.rng.choice([value for value in containers if isinstance(value, dict)])["new"] = 1
            return
        container = self.rng.choice(containers)
        place = self.rng.choice(sorted(container) if isinstance(container, dict) else range(len(container)))
        if how == "a field removed":
            del container[place]
            return
        value = container[place]
        if isinstance(value, bool):
            container[place] = not value
        elif isinstance(value, int | float):
            container[place] = value + 1
        else:
            container[place] = f"{value}x"


def _walk(value: Any) -> list[Any]:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value, *(found for part in inside for found in _walk(part))]


def shard_of(key: str) -> int | None:
    """Return the shard that an object is about; None for one of the store as a whole."""
    array, _, name = key.partition("/c.")
    whole = array.startswith(("index/", "target/")) or not name
    return None if whole else int(name.split(".")[0])
