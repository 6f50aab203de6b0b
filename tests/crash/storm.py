"""A precompute that tests kill and resume, and what must be true of its store at every step."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from dspark_store import open_cache
from dspark_store.format.ledger import state_ledger, token_ledger
from dspark_store.format.metadata import COPY_KEY
from dspark_store.format.storage import LocalStorage
from tests.crash.launch import Running, zygote
from tests.crash.orders import Outcome
from tests.tiny import save_target_dir, tiny_llama, write_chats

KILLED = -9
SHARD_SIZE, BATCH_SIZE = 4, 2
LAST_LAYER_SLOT = 2


@dataclass
class Storm:
    """One job on tiny data: two batches a shard, the last one short, two chunks a long sample.

    ``samples`` are 4 a shard. ``reference`` is the outcome of a run that nobody disturbed, in the store ``whole``.
    """

    place: Path
    tied: bool = False
    samples: int = 10
    flags: Sequence[object] = ()
    reference: Outcome = field(init=False)

    def __enter__(self) -> "Storm":
        save_target_dir(self.place / "target", tiny_llama(tie_word_embeddings=self.tied))
        write_chats(self.place / "chats.jsonl", self.samples)
        self.reference = self.run(self.whole)
        assert self.reference.exit_code == 0, self.reference.log
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the files to pytest."""

    @property
    def batches(self) -> list[int]:
        """Batches of each shard."""
        sizes = [min(SHARD_SIZE, self.samples - first) for first in range(0, self.samples, SHARD_SIZE)]
        return [-(-size // BATCH_SIZE) for size in sizes]

    def run(self, store: Path, *flags: object, **what: Any) -> Outcome:
        """Run the precompute with --resume in forked processes; ``what`` befalls it is in `Order`."""
        return self.start(store, *flags, **what).wait()

    def start(self, store: Path, *flags: object, **what: Any) -> Running:
        """Start the same."""
        return zygote().start([*self._arguments(store), *flags], store, **what)

    def _arguments(self, store: Path) -> list[object]:
        settings = {
            "target-model": self.place / "target",
            "input-data": self.place / "chats.jsonl",
            "output-dir": store,
            "seq-length": 64,
            "chunk-tokens": 32,
            "batch-size": BATCH_SIZE,
            "shard-size": SHARD_SIZE,
            "device": "cpu",
            "encode-threads": 2,
        }
        flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
        return [*flags, "--target-layer-ids", 1, 2, 3, "--resume", *self.flags]

    @property
    def whole(self) -> Path:
        return self.place / "whole"

    def resume(self, store: Path, *flags: object, world: int = 1) -> Outcome:
        """Check a store that was killed, resume it undisturbed, and check that it is the whole one."""
        self.check_refused_unless_complete(store)
        captured, files = committed_states(store), _committed_files(store)
        outcome = self.run(store, *flags, world=world)
        assert outcome.exit_codes == [0] * world, outcome.log
        self.check_only_missing_shards_ran(outcome, captured)
        assert files.items() <= _committed_files(store).items()
        self.check_whole(store)
        return outcome

    def check_whole(self, store: Path) -> None:
        """Check that a store is the one of the undisturbed run, byte by byte, and value by value to zarr-python."""
        assert_same_files(_contents(store), self.whole_contents)
        assert_same_arrays(_arrays(store), self.whole_arrays)
        shared = store / "target_hidden_states"
        for shard in range(len(self.batches)):
            last = store / f"target_last_hidden_states/c.{shard}.0.0"
            assert last.samefile(shared / f"c.{shard}.0.{LAST_LAYER_SLOT}")

    def check_refused_unless_complete(self, store: Path) -> None:
        """Check that a store which a kill interrupted is not read as a whole one."""
        try:
            cache = open_cache(store)
        except (FileNotFoundError, ValueError):
            return
        storage, schema, shards = LocalStorage(store), cache.schema, list(range(len(self.batches)))
        assert token_ledger(storage).committed() == state_ledger(storage, schema).committed() == shards
        assert_same_arrays(_arrays(store), self.whole_arrays)

    @cached_property
    def whole_contents(self) -> dict[str, object]:
        return _contents(self.whole)

    @cached_property
    def whole_arrays(self) -> dict[str, np.ndarray]:
        return _arrays(self.whole)

    def check_only_missing_shards_ran(self, outcome: Outcome, captured: set[int]) -> None:
        """Check that an undisturbed run did each missing shard once, a single worker in order."""
        missing = [shard for shard in range(len(self.batches)) if shard not in captured]
        assert sorted(outcome.shards) == missing
        assert len(outcome.ranks) > 1 or outcome.shards == tuple(missing)
        calibration = outcome.forwards - sum(self.batches[shard] for shard in missing)
        assert calibration in (0, self.calibration * len(outcome.ranks))

    @property
    def calibration(self) -> int:
        """Forwards of each rank that a store of codes begins with: all batches of its first shard."""
        return self.batches[0] if "int8" in self.flags else 0


def committed_states(store: Path) -> set[int]:
    """Return the shards of states that are committed in a store, which may not have begun."""
    return {int(path.name.split(".")[1]) for path in (store / "ledger/states").glob("c.*")}


def _committed_files(store: Path) -> dict[Path, tuple[int, int]]:
    """Return inode and time of each file of a committed shard, ledger rows too: what is never written again."""
    files: list[Path] = []
    committed = {"tokens": ("input_ids", "loss_mask"), "states": ("target_*hidden_states",)}
    for ledger, columns in committed.items():
        for row in (store / "ledger" / ledger).glob("c.*"):
            shard = row.name.split(".")[1]
            files += [row, *(path for column in columns for path in store.glob(f"{column}/c.{shard}.*"))]
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


def assert_same_files(ours: dict[str, object], theirs: dict[str, object]) -> None:
    """Both hold the same files with the same bytes, hidden ones too; producers, and so the seal, may differ."""
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def _contents(store: Path) -> dict[str, object]:
    contents: dict[str, object] = {
        str(path.relative_to(store)): path.read_bytes() for path in store.rglob("*") if path.is_file()
    }
    assert contents.pop(COPY_KEY) == contents["zarr.json"]
    root = json.loads((store / "zarr.json").read_bytes())
    record = root["attributes"]["dspark_store"]
    assert len(record.pop("producers")) >= 1
    assert len(record.pop("seal")) == 32
    return {**contents, "zarr.json": root}


def assert_same_arrays(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    """Stock zarr-python reads the same arrays, with the same bits, from both."""
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        assert values.dtype == theirs[name].dtype
        assert values.shape == theirs[name].shape
        assert values.tobytes() == theirs[name].tobytes(), name


def _arrays(store: Path) -> dict[str, np.ndarray]:
    """Read every array by its name: listing a group warns of a lock that a killed job has left in it."""
    documents = {path.parent: json.loads(path.read_bytes()) for path in store.rglob("zarr.json")}
    folders = [folder for folder, document in documents.items() if document["node_type"] == "array"]
    return {str(folder.relative_to(store)): np.asarray(zarr.open_array(folder, mode="r")[...]) for folder in folders}
