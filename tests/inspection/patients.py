"""Finished stores of real jobs, to be damaged, repaired and resumed; and whether they are what they were."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dspark_store.format.metadata import COPY_KEY, ROOT_KEY
from dspark_store.inspection.repair.plan import repair
from dspark_store.inspection.repair.state import RepairState
from dspark_store.inspection.shardwise import Workers
from dspark_store.precompute.__main__ import main
from dspark_store.precompute.capture import CaptureContext
from tests.inspection.copies import contents
from tests.inspection.faults import copy_store
from tests.tiny import save_target_dir, tiny_gemma, tiny_llama, write_chats

BATCH_SIZE, SHARD_SIZE, SAMPLES = 2, 4, 10


@dataclass(frozen=True)
class Patient:
    """The finished store of a job, and stores of other runs with the same shape."""

    store: Path
    flags: list[str]
    others: tuple[Path, ...]

    def copy(self, to: Path) -> Path:
        return copy_store(self.store, to)

    def resume(self, store: Path) -> int:
        """Resume the job in a copy of its store; return how many samples the target was run over."""
        counted = 0
        forward = CaptureContext.forward

        def count(context: CaptureContext, ids: Any, attention: Any) -> Any:
            nonlocal counted
            counted += len(ids)
            return forward(context, ids, attention)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CaptureContext, "forward", count)
            assert main([*self.flags, "--output-dir", str(store), "--resume"]) == 0
        return counted

    def check_whole(self, store: Path, *, captured: bool) -> None:
        """Check that a store is, file by file, what it was; if states were ``captured``, but for who made it."""
        ours, theirs = contents(store), contents(self.store)
        if captured:
            assert ours.pop(COPY_KEY) == ours[ROOT_KEY]
            assert theirs.pop(COPY_KEY) == theirs[ROOT_KEY]
            ours[ROOT_KEY], theirs[ROOT_KEY] = (_without_producers(root[ROOT_KEY]) for root in (ours, theirs))
        assert ours.keys() == theirs.keys()
        assert [key for key in ours if ours[key] != theirs[key]] == []


def make_patient(place: Path, kind: str) -> Patient:
    """Run the jobs of a kind of store."""
    place.mkdir(parents=True, exist_ok=True)
    models: dict[str, Callable[[int], Any]] = {"tied": tiny_gemma, "blend": tiny_llama}
    model = models.get(kind, tiny_llama)
    stores = []
    for number, (seed, corpus) in enumerate(((0, 0), (0, 1), (1, 0))):
        target, data = place / f"target-{seed}", place / f"chats-{corpus}.jsonl"
        save_target_dir(target, model(seed))
        write_chats(data, SAMPLES, seed=corpus)
        flags = _flags(kind, target, data)
        stores.append((place / f"store-{number}", flags))
        assert main([*flags, "--output-dir", str(stores[-1][0])]) == 0
    (store, flags), *others = stores
    return Patient(store, flags, tuple(path for path, _ in others))


def _flags(kind: str, target: Path, data: Path) -> list[str]:
    source = str(data)
    if kind == "blend":
        dummy = {"type": "dummy", "max_length": 20, "samples": 3, "seed": len(data.name)}
        source = json.dumps({"type": "blend", "sources": [{"type": "chat", "path": source}, dummy]})
    options: dict[str, object] = {
        "target-model": target,
        "input-data": source,
        "device": "cpu",
        "batch-size": BATCH_SIZE,
        "shard-size": SHARD_SIZE,
        "seq-length": 64,
        "chunk-tokens": 32,
        "dtype": "bf16" if kind == "tied" else "fp32",
        "codec": "none" if kind == "blend" else "default",
    }
    flags = [str(item) for name, value in options.items() for item in (f"--{name}", value)]
    return [*flags, "--target-layer-ids", "0", "1"] if kind == "inner layers" else flags


def mended(store: Path) -> RepairState:
    """Repair a store."""
    return repair(str(store), Workers(threads=1))


def _without_producers(root: bytes) -> bytes:
    document = json.loads(root)
    for field in ("producers", "seal"):
        del document["attributes"]["dspark_store"][field]
    return json.dumps(document).encode()
