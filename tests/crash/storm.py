"""A precompute that tests kill and resume, and what must be true of its store at every step."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import zarr

from dspark_store import open_cache
from dspark_store.format.storage import LocalStorage
from dspark_store.writers.states import state_ledger
from dspark_store.writers.tokens import token_ledger
from tests.crash.zygote import Order, Outcome, order_text, outcome_of
from tests.tiny import save_target_dir, tiny_llama, write_chats

KILLED = -9
SAMPLES, SHARD_SIZE, BATCH_SIZE = 10, 4, 2
LAST_LAYER_SLOT = 2
_BATCHES = (2, 2, 1)
_ROOT = Path(__file__).parents[2]


@dataclass
class Storm:
    """One job on tiny data: three shards, the last one short, two batches a shard, two chunks a long sample.

    ``reference`` is the outcome of a run that nobody disturbed, in the store ``whole``.
    """

    place: Path
    tied: bool
    _started: int = 0
    _zygote: "subprocess.Popen[str]" = field(init=False)
    reference: Outcome = field(init=False)

    def __enter__(self) -> "Storm":
        save_target_dir(self.place / "target", tiny_llama(tie_word_embeddings=self.tied))
        write_chats(self.place / "chats.jsonl", SAMPLES)
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        environment = {**os.environ, **threads, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env=environment,
        )
        self.reference = self.run(self.whole)
        assert self.reference.exit_code == 0, self.reference.log
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._zygote.stdin, self._zygote.stdout):
            if pipe is not None:
                pipe.close()
        self._zygote.kill()
        self._zygote.wait()

    @property
    def whole(self) -> Path:
        return self.place / "whole"

    def run(self, store: Path, *, kill_after: float | None = None, kill_at: int | None = None) -> Outcome:
        """Run the precompute with --resume in a forked process."""
        self._started += 1
        order = Order(
            arguments=self._arguments(store),
            store=str(store),
            trace=str(self.place / f"{self._started}.trace"),
            log=str(self.place / f"{self._started}.log"),
            kill_after=kill_after,
            kill_at=kill_at,
        )
        if self._zygote.stdin is None or self._zygote.stdout is None:
            raise RuntimeError("the zygote was started without pipes")
        self._zygote.stdin.write(order_text(order))
        self._zygote.stdin.flush()
        return outcome_of(order, self._zygote.stdout.readline())

    def _arguments(self, store: Path) -> list[str]:
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
        flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
        return [*flags, "--target-layer-ids", "1", "2", "3", "--resume"]

    def resume(self, store: Path) -> None:
        """Check a store that was killed, resume it undisturbed, and check that it is the whole one."""
        self.check_refused_unless_complete(store)
        captured, files = committed_states(store), _committed_files(store)
        outcome = self.run(store)
        assert outcome.exit_code == 0, outcome.log
        self.check_only_missing_shards_ran(outcome, captured)
        assert files.items() <= _committed_files(store).items()
        assert_same_files(_contents(store), self.whole_contents)
        assert_same_arrays(_arrays(store), self.whole_arrays)
        shared = store / "target_hidden_states"
        for shard in range(len(_BATCHES)):
            last = store / f"target_last_hidden_states/c.{shard}.0.0"
            assert last.samefile(shared / f"c.{shard}.0.{LAST_LAYER_SLOT}")

    def check_refused_unless_complete(self, store: Path) -> None:
        """Check that a store which a kill interrupted is not read as a whole one."""
        try:
            cache = open_cache(store)
        except (FileNotFoundError, ValueError):
            return
        storage, schema = LocalStorage(store), cache.schema
        assert token_ledger(storage).committed() == state_ledger(storage, schema).committed() == [0, 1, 2]
        assert_same_arrays(_arrays(store), self.whole_arrays)

    @cached_property
    def whole_contents(self) -> dict[str, object]:
        return _contents(self.whole)

    @cached_property
    def whole_arrays(self) -> dict[str, np.ndarray]:
        return _arrays(self.whole)

    @staticmethod
    def check_only_missing_shards_ran(outcome: Outcome, captured: set[int]) -> None:
        missing = [shard for shard in range(len(_BATCHES)) if shard not in captured]
        assert outcome.shards == tuple(missing)
        assert outcome.forwards == sum(_BATCHES[shard] for shard in missing)


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
