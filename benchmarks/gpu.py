"""A capture and the loader on one GPU, measured and checked in under six minutes.

``benchmarks/gpu.sh [--tiny] [--place DIR]`` finds a Python and runs this. A random target of about 1.3 billion
parameters is made on the device; nothing is downloaded. Each part has a limit of time, at which the process ends with
a traceback; figures are printed as they come. With ``$OUT`` set, they are also in ``$OUT/gpu.json``. ``--tiny`` takes a
tiny target, on the CPU where there is no GPU. The exit code is 1 when a check fails or a part does not end.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import batched, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks.captures import CaptureWork, new_workload, run_copies, run_forwards, run_writing
from benchmarks.costs import elapsed
from benchmarks.flags import parsed
from benchmarks.samples import BF16, new_schema
from dspark_store import CacheLoader, open_cache, verify_store
from dspark_store.format.schema import LAST, LAYERS
from dspark_store.precompute.capture import CaptureSettings
from dspark_store.precompute.copies import HostCopies
from dspark_store.precompute.recompute import recompute
from dspark_store.target.capture import StageCapture, StageStates, TargetCapture
from dspark_store.target.layers import build_target_layer_ids
from dspark_store.target.parallel import ParallelPlan
from dspark_store.target.sharded import ShardedTarget
from dspark_store.writers.publish import complete_store

type Batch = dict[str, torch.Tensor]

MOST_THREADS = 8
ROUNDS, ROUND_SECONDS = 3, 90.0
CHECKED, COMPARED, STEP_BATCHES = 4, 4, 16


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure with its unit, or a check that was ``passed`` or was not."""

    name: str
    value: float
    unit: str = ""
    passed: bool | None = None

    def __str__(self) -> str:
        verdict = "" if self.passed is None else "ok" if self.passed else "FAILED"
        return f"{self.name:46} {self.value:12,.3f} {self.unit:10} {verdict}".rstrip()


class Sizes(NamedTuple):
    """The target, and the samples, of between an eighth of ``seq_length`` and all of it."""

    target: Qwen3Config
    samples: int
    seq_length: int
    batch_size: int
    shard_size: int


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, vocab: int) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden // heads,
        vocab_size=vocab,
        tie_word_embeddings=True,
    )


FULL = Sizes(_qwen3(2048, 6144, 24, 16, 32_000), samples=384, seq_length=1024, batch_size=8, shard_size=96)
TINY = Sizes(_qwen3(64, 128, 6, 4, 256), samples=12, seq_length=64, batch_size=4, shard_size=6)


class GpuRun:
    """The target on the device and its tokens in ``place``, then the store that is written and read there."""

    def __init__(self, sizes: Sizes, device: torch.device, place: Path) -> None:
        torch.manual_seed(0)
        config = sizes.target
        with device:
            self.model: PreTrainedModel = Qwen3ForCausalLM(config)
        if device.type == "cuda":
            self.model.bfloat16()
        self.sizes, self.device, self.store = sizes, device, place / "store"
        self.layer_ids = tuple(build_target_layer_ids(config.num_hidden_layers, 5))
        least, most = sizes.seq_length // 8, sizes.seq_length
        lengths = np.random.default_rng(0).integers(least, most, sizes.samples, endpoint=True).tolist()
        self.workload: CaptureWork = new_workload(
            place / "tokens",
            new_schema(0, sizes.shard_size, sizes.seq_length, config.hidden_size, self.layer_ids, "default"),
            lengths,
            CaptureSettings(device, sizes.batch_size, 0, config.num_hidden_layers - 1, stop_on_nonfinite=False),
            vocab_size=config.vocab_size,
            encode_threads=min(MOST_THREADS, os.cpu_count() or 1),
        )

    def seconds(self, action: Callable[[], object]) -> float:
        """Return the time of an action by the clock, until the device has done what it queued."""
        return elapsed(action, self.device).clock

    def measure_capture(self) -> Iterator[Figure]:
        """Run the batches alone, with copies and with writing, by turns."""
        yield Figure("parameters of the target", self.model.num_parameters() / 1e6, "million")
        capture = ShardedTarget(self.model, ParallelPlan(1), 0).capture(self.layer_ids)
        tokens, stored = self.workload.tokens, 0
        run_forwards(self.workload, capture)
        copy = self._copy_seconds(capture)
        times: list[tuple[float, float, float]] = []
        ends = time.monotonic() + ROUND_SECONDS
        while len(times) < ROUNDS and (not times or time.monotonic() < ends):
            alone = self.seconds(lambda: run_forwards(self.workload, capture))
            copied = self.seconds(lambda: run_copies(self.workload, capture))
            shutil.rmtree(self.store, ignore_errors=True)
            target = self.workload.copied(self.store)
            begun = time.perf_counter()
            stored = run_writing(target, capture)
            times.append((alone, copied, time.perf_counter() - begun))
        forward, copying, writing = (statistics.median(kind) for kind in zip(*times, strict=True))
        yield Figure("forward alone", tokens / forward, "tokens/s")
        yield Figure("forward with copies to the host", tokens / copying, "tokens/s")
        yield Figure("forward with copies and writing", tokens / writing, "tokens/s")
        yield Figure("time with writing / forward alone", writing / forward, "x")
        yield Figure("copies alone", copy, "s")
        if self.device.type == "cuda":
            yield Figure("share of the copies that is hidden", _share(1 - (copying - forward) / copy))
        yield Figure("states stored", stored / 1e9, "GB")

    def _copy_seconds(self, capture: StageCapture) -> float:
        """Return how long the copies of a whole run take with nothing beside them, from those of its first batch."""
        ids, attention = next(self.workload.batches())
        states = capture(ids.to(self.device), attention.to(self.device))
        copies = HostCopies(self.device, BF16.torch_dtype)
        copies.start(states).wait()
        seconds = statistics.median(self.seconds(lambda: copies.start(states).wait()) for _ in range(5))
        return seconds * sum(batch.numel() for batch, _ in self.workload.batches()) / ids.numel()

    def check_states(self) -> Iterator[Figure]:
        """Publish the store, and compare it with its own promises and with fresh forwards."""
        target = self.workload.at(self.store)
        complete_store(target.storage, target.record)
        cache = open_cache(self.store)
        problems = verify_store(cache)
        yield Figure("problems in the store", len(problems), passed=not problems)
        samples = np.random.default_rng(1).choice(len(cache), CHECKED, replace=False).tolist()
        capture = TargetCapture(self.model, self.layer_ids)
        settings = self.workload.settings
        again = recompute(cache, capture, settings.device, settings.batch_limit, samples)
        worst = [difference for _, difference in again]
        passed = len(worst) == CHECKED and max(worst) == 0
        yield Figure(f"difference from fresh forwards, {CHECKED} samples", max(worst), passed=passed)
        yield Figure("fp32 states cast on the device as on the CPU", 1, passed=self._casts_alike())

    def _casts_alike(self) -> bool:
        """Whether states in float32, of all magnitudes, are rounded alike, and a shared one is copied once."""
        width = self.sizes.target.hidden_size
        wanted = torch.randn(2, 64, width) * torch.logspace(-30, 30, width)
        last = wanted.to(self.device)
        copies = HostCopies(self.device, BF16.torch_dtype)
        arrived = copies.start(StageStates((0, 1), (last.neg(), last), last)).wait()
        pairs = ((arrived.layers[0], wanted.neg()), (arrived.layers[1], wanted))
        equal = (_same_bits(*(states.to(BF16.torch_dtype) for states in pair)) for pair in pairs)
        return all(equal) and arrived.last is arrived.layers[1]

    def loader(self) -> CacheLoader:
        """Return a loader whose batches arrive on the device, by way of pinned memory and a side stream."""
        cache = open_cache(self.store)
        return CacheLoader(cache, self.sizes.batch_size, layout="stacked", dp_rank=0, dp_size=1, device=self.device)

    def plain_batches(self) -> Iterator[Batch]:
        """Yield the loader's batches, read when they are asked for into pageable memory and copied from there."""
        loader = self.loader()
        for rows in batched(loader.epoch_samples().tolist(), self.sizes.batch_size):
            batch = loader.cache.read(rows, layout="stacked")
            yield {name: values.to(self.device) for name, values in batch.items()}

    def measure_loader(self) -> Iterator[Figure]:
        """Read epochs with nothing to do between batches, and with a step of about a plain read's time, both ways."""
        batches, rates = len(self.loader()), []
        sources: dict[str, Callable[[], Iterable[Batch]]] = {
            "plain reads and copies": self.plain_batches,
            "loader, copies on a side stream": self.loader,
        }
        for name, source in sources.items():
            nbytes = consume(source(), _nothing, batches)
            seconds = self._epoch_seconds(source, _nothing, batches)
            rates.append(batches * self.sizes.batch_size / seconds)
            yield Figure(name, rates[-1], "samples/s")
            yield Figure(f"{name}, states", nbytes / seconds / 1e9, "GB/s")
        yield Figure("loader / plain", rates[1] / rates[0], "x")
        different = self._differing_batches()
        yield Figure("batches that differ on the device", different, passed=different == 0)
        product = statistics.median(self.seconds(Step(self.device, 8)) for _ in range(ROUNDS)) / 8
        step = Step(self.device, max(1, round(self.sizes.batch_size / rates[0] / product)))
        limit = min(STEP_BATCHES, batches)
        alone = statistics.median(self.seconds(step) for _ in range(limit)) * 1e3
        plain, loaded = (self._epoch_seconds(source, step, limit) / limit * 1e3 for source in sources.values())
        yield Figure("a step alone", alone, "ms")
        yield Figure("a step with plain reads and copies", plain, "ms")
        yield Figure("a step with the loader", loaded, "ms")
        if plain > alone:
            yield Figure("share of the reading that is hidden", _share(1 - (loaded - alone) / (plain - alone)))

    def _epoch_seconds(self, source: Callable[[], Iterable[Batch]], step: Callable[[], object], limit: int) -> float:
        return statistics.median(self.seconds(lambda: consume(source(), step, limit)) for _ in range(ROUNDS))

    def _differing_batches(self) -> int:
        """Count batches of an epoch that are not what a plain read gives, while steps keep the device busy."""
        step, different, cache = Step(self.device, 20), 0, open_cache(self.store)
        for count, batch in enumerate(self.loader()):
            step()
            if count % max(1, len(cache) // self.sizes.batch_size // COMPARED) == 0:
                wanted = cache.read(batch["sample"].tolist(), layout="stacked")
                different += not all(_same_bits(batch[name].cpu(), values) for name, values in wanted.items())
        return different


class Step:
    """A training step's stand-in on the device: ``products`` matrix products."""

    def __init__(self, device: torch.device, products: int) -> None:
        width, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (128, torch.float32)
        self._matrix = torch.randn(width, width, device=device, dtype=dtype) / width**0.5
        self._products = products

    def __call__(self) -> None:
        """Queue the products."""
        values = self._matrix
        for _ in range(self._products):
            values = values @ self._matrix


def consume(batches: Iterable[Batch], step: Callable[[], object], limit: int) -> int:
    """Take up to ``limit`` batches, a step after each, and look at a value of each; return their states' bytes."""
    nbytes = 0
    for batch in islice(batches, limit):
        step()
        float(batch[LAST][..., 0].sum())
        nbytes += batch[LAYERS].nbytes + batch[LAST].nbytes
    return nbytes


def _nothing() -> None:
    """Stand in for a step that takes no time."""


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def run_parts(parts: Iterable[tuple[str, float, Callable[[], Iterator[Figure]]]], out: Path | None) -> bool:
    """Run the parts in order, each within its seconds; print and keep every figure; return whether all checks passed.

    A part that takes longer ends the process with exit code 1; the JSON then says that the run has not passed.
    """
    figures: list[Figure] = []

    def save(passed: bool) -> None:
        if out is not None:
            document = {"passed": passed, "rows": [asdict(figure) for figure in figures]}
            (out / "gpu.json").write_text(json.dumps(document, indent=2) + "\n")

    for name, seconds, measure in parts:
        print(f"measuring: {name}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback_later(seconds, exit=True)
        for figure in measure():
            print(figure, flush=True)
            figures.append(figure)
            save(False)
        faulthandler.cancel_dump_traceback_later()
    passed = all(figure.passed is not False for figure in figures)
    save(passed)
    return passed


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code, 2 when there is no GPU."""
    given = parsed("gpu", arguments)
    if not (torch.cuda.is_available() or given.tiny):
        print("torch sees no CUDA device: run this on a GPU, or try it with --tiny", file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, {os.cpu_count()} cores", file=sys.stderr)
    if device.type == "cpu":
        torch.set_num_threads(1)  # products this small only wait for other threads
    if given.place is not None:
        given.place.mkdir(parents=True, exist_ok=True)
    out = Path(os.environ["OUT"]) if os.environ.get("OUT") else None
    with tempfile.TemporaryDirectory(prefix="dspark-gpu-", dir=given.place) as place:
        faulthandler.dump_traceback_later(120, exit=True)
        run = GpuRun(TINY if given.tiny else FULL, device, Path(place))
        parts = [
            ("capture", 150.0, run.measure_capture),
            ("checks", 60.0, run.check_states),
            ("loader", 105.0, run.measure_loader),
        ]
        return 0 if run_parts(parts, out) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
