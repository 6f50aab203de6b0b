"""Jobs of several ranks on tiny targets that 1, 2, 3 and 4 ranks can share: 12 heads, 12 experts, 6 layers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark_store import open_cache
from tests.crash.launch import Running, zygote
from tests.crash.orders import Outcome, Plant
from tests.precompute.jobs import arguments, contents
from tests.tiny import save_target_dir, tiny_llama, tiny_qwen3_moe, write_chats

SAMPLES, SHARDS, BATCHES = 22, 6, 11
"""Chats, the shards that they make, and the batches in all: four chats a shard, two a batch."""

_SHAPE = {
    "num_hidden_layers": 6,
    "hidden_size": 48,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "intermediate_size": 96,
}
_EXPERTS = {"num_experts": 12, "moe_intermediate_size": 24}
TARGETS = {"dense": lambda: tiny_llama(**_SHAPE), "moe": lambda: tiny_qwen3_moe(**_SHAPE, **_EXPERTS)}


@dataclass
class RankJobs:
    """Runs of one job, and the stores that one process made, by target and flags."""

    place: Path
    hidden_size: int = _SHAPE["hidden_size"]
    _wholes: dict[tuple[object, ...], Path] = field(default_factory=dict)
    _bytes: dict[str, int] = field(default_factory=dict)

    def start(self, store: Path, *flags: object, target: str = "moe", **what: Any) -> Running:
        """Start a job; ``what`` befalls it is in `Order`."""
        folder, data = self.place / target, self.place / "chats.jsonl"
        if not folder.exists():
            save_target_dir(folder, TARGETS[target]())
        if not data.exists():
            write_chats(data, SAMPLES)
        layers = ("--target-layer-ids", -1, 1, 3, 5, "--encode-threads", 1)
        return self.start_command(store, *arguments(folder, data, store, *layers, *flags), **what)

    @staticmethod
    def start_command(store: Path, *flags: object, **what: Any) -> Running:
        """Start the command with just these flags."""
        return zygote().start(flags, store, **what)

    def run(self, store: Path, *flags: object, **what: Any) -> Outcome:
        """Run a job that must succeed."""
        outcome = self.start(store, *flags, **what).wait()
        assert outcome.exit_codes == [0] * len(outcome.ranks), outcome.log
        return outcome

    @staticmethod
    def failing(stage: str, rank: int = 0, **what: Any) -> tuple[Plant, ...]:
        """Return the one plant that makes a rank fail in a stage."""
        return (Plant(rank, stage, **what),)

    def whole(self, *flags: object, target: str = "moe") -> Path:
        """Return the store that one process makes."""
        key = (target, *flags)
        if key not in self._wholes:
            store = self.place / f"whole-{len(self._wholes)}"
            outcome = self.run(store, *flags, target=target)
            self._wholes[key] = store
            if not flags:
                (self._bytes[target],) = outcome.ranks[0].numbers("bytes")
        return self._wholes[key]

    def whole_bytes(self, target: str) -> int:
        """Return the bytes of a target's parameters."""
        self.whole(target=target)
        return self._bytes[target]

    def assert_equals_whole(self, store: Path, *flags: object, target: str = "moe") -> None:
        """Check that a store is that of one process, every file, but for who made it."""
        assert_same_store(store, self.whole(*flags, target=target))


def assert_same_store(store: Path, whole: Path, but: Sequence[str] = ()) -> None:
    """Check that two stores hold the same files, but for who made them and some fields of the manifest."""
    ours, theirs = contents(store), contents(whole)
    for stored in (ours, theirs):
        root: Any = stored["zarr.json"]
        for name in but:
            root["attributes"]["dspark_store"]["manifest"].pop(name, None)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def states(store: Path) -> Sequence[torch.Tensor]:
    """Return the valid states of every sample, all layers of it and the last hidden states, in the cache dtype."""
    cache = open_cache(store)
    columns = ("target_hidden_states", "target_last_hidden_states")
    return [cache[row][name][: int(cache.lengths[row])] for row in range(len(cache)) for name in columns]


def equal_share(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Return the share of elements that are equal."""
    same = [torch.eq(left, right).flatten() for left, right in zip(ours, theirs, strict=True)]
    return float(np.mean(torch.cat(same).numpy()))


def greatest_difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    return max(float((left - right).abs().max()) for left, right in zip(ours, theirs, strict=True))
