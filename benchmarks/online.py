"""What training from a store saves: memory and time beside the same training with the target run live.

``python -m benchmarks.online STORE -- --mask-token-id 16 --max-steps 20`` does two trainings with the flags of
`dspark_store.train` behind ``--``, each in a process of its own: one from the store, one online from the target and
the data that its manifest names, which runs one sample at a time: the least memory that it can do with. Both are on
the CPU, where all memory is the process's; their own summaries say what they took. The losses differ by the last bits
of states that were made in other batches; where they differ by more, the two trainings were not of the same samples.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import yaml

from benchmarks.estimate import settings_of_store
from benchmarks.flags import parsed
from dspark_store import open_cache
from dspark_store.readers.cache import Cache
from dspark_store.target.capture import find_base_model
from dspark_store.target.device import resolve_compute_dtype
from dspark_store.target.load import load_target
from dspark_store.target.source import TargetSource
from dspark_store.training.journal import read_metrics

SAME = 1e-3
"""How far losses may be apart, as a share, to be those of the same training."""

_UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_SUMMARY = re.compile(
    r"^(\d+) steps in (\d+) s; waited for data ([\d.]+)% of the steps' time; at most ([\d.]+) (\w+) of memory",
    re.MULTILINE,
)


class TrainingSummary(NamedTuple):
    """What a training says of itself: steps, seconds, the share that it waited for data, and its most memory."""

    steps: int
    seconds: int
    waited: float
    memory: float

    @classmethod
    def of(cls, printed: str) -> TrainingSummary:
        """Read it from what the training printed. ValueError when it is not there."""
        found = _SUMMARY.search(printed)
        if found is None:
            raise ValueError(f"a training printed no summary: {printed!r}")
        steps, seconds, waited, memory, unit = found.groups()
        return cls(int(steps), int(seconds), float(waited) / 100, float(memory) * _UNITS[unit])


def main(arguments: Sequence[str] | None = None) -> int:
    """Train twice and compare; return 0, or 1 when the two did not learn the same."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    given, flags = parsed("online", words[:cut]), words[cut + 1 :]
    cache = open_cache(given.store)
    with tempfile.TemporaryDirectory() as place:
        job = Path(place) / "job.yaml"
        job.write_text(yaml.safe_dump({**settings_of_store(cache), "batch_size": 1}), encoding="utf-8")
        stored = _trained(Path(place) / "stored", "--store", given.store, *flags)
        live = _trained(Path(place) / "live", "--online", str(job), *flags)
        losses = [[line.figures["loss"] for line in read_metrics(Path(place) / name)] for name in ("stored", "live")]
    layers = layer_bytes(cache)
    print(f"{stored.steps} steps         from the store       online")
    print(f"seconds          {stored.seconds:>14}  {live.seconds:>11}")
    print(f"waited for data  {stored.waited:>14.1%}  {live.waited:>11.1%}")
    print(f"most memory, MB  {stored.memory / 1e6:>14,.0f}  {live.memory / 1e6:>11,.0f}")
    saved = live.memory - stored.memory
    print(f"\nmemory saved: {saved / 1e6:,.0f} MB; the target's decoder layers weigh {layers / 1e6:,.0f} MB")
    apart = max(abs(first / second - 1) for first, second in zip(*losses, strict=True))
    print(f"losses differ by at most {apart:.1e}")
    return 0 if apart < SAME else 1


def layer_bytes(cache: Cache) -> int:
    """Return the bytes of the weights of the target's decoder layers, as online training holds them."""
    source, device = TargetSource(str(cache.manifest["target_model"])), torch.device("cpu")
    target = load_target(source, dtype=resolve_compute_dtype("auto", device), device=device)
    _, layers = find_base_model(target)
    return sum(weight.nbytes for layer in layers for weight in layer.parameters())


def _trained(output: Path, *flags: str) -> TrainingSummary:
    """Train in a process of its own, whose progress is seen."""
    command = [sys.executable, "-m", "dspark_store.train", "--output-dir", str(output), *flags, "--device", "cpu"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return TrainingSummary.of(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
