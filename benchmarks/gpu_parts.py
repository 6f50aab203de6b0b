"""The parts of ``benchmarks/gpu.sh``, measured in this process: one line of JSON for each part and each figure."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks.captures import Workload, elapsed, new_workload, run_copies, run_forwards, run_writing, wait_for
from benchmarks.gpu import Message, Row
from benchmarks.gpu_loader import measure_loader, measure_step
from dspark_store import open_cache, verify_store
from dspark_store.format.dtypes import cache_dtype
from dspark_store.format.grid import default_chunk_tokens
from dspark_store.format.schema import StoreSchema
from dspark_store.precompute.capture import Capture, CaptureSettings
from dspark_store.precompute.copies import HostCopies
from dspark_store.precompute.recompute import recompute
from dspark_store.target.capture import StageStates, TargetCapture
from dspark_store.target.layers import build_target_layer_ids
from dspark_store.target.parallel import ParallelPlan
from dspark_store.target.sharded import ShardedTarget
from dspark_store.writers.publish import complete_store

STATES_DTYPE = cache_dtype("bf16")
BUFFER_BYTES = 512 * 1024 * 1024
MOST_THREADS = 8
ROUNDS, ROUND_SECONDS = 3, 90.0
CHECKED = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a run. Samples have between an eighth of ``seq_length`` and all of it."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    head_dim: int
    vocab_size: int
    samples: int
    seq_length: int
    batch_size: int
    shard_size: int

    def lengths(self) -> list[int]:
        """Return the length of every sample."""
        random = np.random.default_rng(0)
        lengths: list[int] = random.integers(
            self.seq_length // 8, self.seq_length, self.samples, endpoint=True
        ).tolist()
        return lengths

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The layers that are captured."""
        return tuple(build_target_layer_ids(self.layers, 5))


FULL = Sizes(2048, 6144, 24, 16, 128, 32_000, samples=384, seq_length=1024, batch_size=8, shard_size=96)
TINY = Sizes(64, 128, 6, 4, 16, 256, samples=12, seq_length=64, batch_size=4, shard_size=6)


@dataclass(slots=True)
class Bench:
    """What the parts hand on: the target and its tokens, then the store that was written."""

    sizes: Sizes
    device: torch.device
    place: Path
    model: PreTrainedModel
    workload: Workload

    @property
    def store(self) -> Path:
        """Where the states are written."""
        return self.place / "store"

    def capture(self) -> Capture:
        """Return the capture that a job uses."""
        return ShardedTarget(self.model, ParallelPlan(1), 0).capture(self.sizes.layer_ids)


def build(sizes: Sizes, device: torch.device, place: Path) -> Bench:
    """Make the target on the device, in the dtype that a job would choose, and its tokens in ``place``."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads // 2,
        head_dim=sizes.head_dim,
        tie_word_embeddings=True,
    )
    with device:
        model = Qwen3ForCausalLM(config)
    if device.type == "cuda":
        model.bfloat16()
    chunk = default_chunk_tokens(sizes.hidden_size, STATES_DTYPE.itemsize, sizes.seq_length, compressed=True)
    ids = sizes.layer_ids
    schema = StoreSchema(
        *(0, sizes.shard_size, sizes.seq_length, sizes.hidden_size, len(ids), ids, STATES_DTYPE, "default"),
        min(chunk, sizes.seq_length),
    )
    workload = new_workload(
        place / "tokens",
        schema,
        sizes.lengths(),
        CaptureSettings(device, sizes.batch_size, 0, sizes.layers - 1, stop_on_nonfinite=False),
        vocab_size=sizes.vocab_size,
        encode_threads=min(MOST_THREADS, os.cpu_count() or 1),
        buffer_bytes=BUFFER_BYTES,
    )
    return Bench(sizes, device, place, model, workload)


def measure_capture(bench: Bench) -> Iterator[Row]:
    """Run the batches alone, with copies and with writing, by turns; yield the rows anew after every round."""
    capture, workload, device = bench.capture(), bench.workload, bench.device
    tokens = workload.tokens
    run_forwards(workload, capture)
    copy = _copy_seconds(bench, capture)
    alone: list[float] = []
    copied: list[float] = []
    written: list[float] = []
    ends = time.monotonic() + ROUND_SECONDS
    while len(alone) < ROUNDS and (not alone or time.monotonic() < ends):
        alone.append(elapsed(lambda: run_forwards(workload, capture), device).clock)
        copied.append(elapsed(lambda: run_copies(workload, capture), device).clock)
        seconds, stored = _write(bench, capture)
        written.append(seconds)
        forward, copying, writing = (statistics.median(times) for times in (alone, copied, written))
        yield Row("forward alone", tokens / forward, "tokens/s")
        yield Row("forward with copies to the host", tokens / copying, "tokens/s")
        yield Row("forward with copies and writing", tokens / writing, "tokens/s")
        yield Row("time with writing / forward alone", writing / forward, "x")
        yield Row("copies alone", copy, "s")
        if device.type == "cuda":
            yield Row("share of the copies that is hidden", _share(1 - (copying - forward) / copy), "")
        yield Row("states stored", stored / 1e9, "GB")


def _write(bench: Bench, capture: Capture) -> tuple[float, int]:
    """Write the store anew; return the seconds by the clock and the stored bytes."""
    shutil.rmtree(bench.store, ignore_errors=True)
    target = bench.workload.copied(bench.store)
    wait_for(bench.device)
    started = time.perf_counter()
    stored = run_writing(target, capture)
    return time.perf_counter() - started, stored


def _copy_seconds(bench: Bench, capture: Capture) -> float:
    """Return how long the copies of a whole run take with nothing beside them, from those of its first batch."""
    batches = bench.workload.batches()
    ids, attention = next(batches)
    states = capture(ids.to(bench.device), attention.to(bench.device))
    copies = HostCopies(bench.device, STATES_DTYPE.torch_dtype)
    copies.start(states).wait()
    seconds = statistics.median(elapsed(lambda: copies.start(states).wait(), bench.device).clock for _ in range(5))
    return seconds * sum(batch.numel() for batch, _ in bench.workload.batches()) / ids.numel()


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


def check_states(bench: Bench) -> Iterator[Row]:
    """Publish the store, and compare it with its own promises and with fresh forwards."""
    target = bench.workload.at(bench.store)
    complete_store(target.storage, target.record)
    cache = open_cache(bench.store)
    problems = verify_store(cache)
    yield Row("problems in the store", len(problems), "", passed=not problems)
    samples = np.random.default_rng(1).choice(len(cache), CHECKED, replace=False).tolist()
    capture = TargetCapture(bench.model, bench.sizes.layer_ids)
    worst = [difference for _, difference in recompute(cache, capture, bench.workload.settings, samples)]
    passed = len(worst) == CHECKED and max(worst) == 0
    yield Row(f"difference from fresh forwards, {CHECKED} samples", max(worst), "", passed=passed)
    yield Row("fp32 states cast on the device as on the CPU", 1, "", passed=_casts_alike(bench))


def _casts_alike(bench: Bench) -> bool:
    """Whether states in float32, of all magnitudes, are rounded alike, and a shared one is copied once."""
    wanted = torch.randn(2, 64, bench.sizes.hidden_size) * torch.logspace(-30, 30, bench.sizes.hidden_size)
    last = wanted.to(bench.device)
    copies = HostCopies(bench.device, STATES_DTYPE.torch_dtype)
    arrived = copies.start(StageStates((0, 1), (last.neg(), last), last)).wait()
    pairs = ((arrived.layers[0], wanted.neg()), (arrived.layers[1], wanted))
    equal = (torch.equal(_bits(ours), _bits(theirs)) for ours, theirs in pairs)
    return all(equal) and arrived.last is arrived.layers[1]


def _bits(states: torch.Tensor) -> torch.Tensor:
    return states.to(STATES_DTYPE.torch_dtype).view(torch.int16)


def run_parts(sizes: Sizes, device: torch.device, place: Path) -> None:
    """Measure everything, and print what there is to tell as it comes."""
    _tell(Message("target"))
    started = time.perf_counter()
    bench = build(sizes, device, place)
    parameters = sum(weights.numel() for weights in bench.model.parameters())
    _tell(Message("target", Row("parameters of the target", parameters / 1e6, "million")))
    _tell(Message("target", Row("target and tokens were made in", time.perf_counter() - started, "s")))
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "capture": lambda: measure_capture(bench),
        "checks": lambda: check_states(bench),
        "loader": lambda: measure_loader(bench.store, sizes.batch_size, device),
        "step": lambda: measure_step(bench.store, sizes.batch_size, device),
    }
    for part, rows in parts.items():
        _tell(Message(part))
        for row in rows():
            _tell(Message(part, row))


def _tell(message: Message) -> None:
    print(message.to_json(), flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run the parts in this process; return the exit code, 2 when there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_parts", description=__doc__)
    parser.add_argument("place", type=Path)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(arguments)
    if not (torch.cuda.is_available() or given.tiny):
        print("torch sees no CUDA device: run this on a GPU, or try it with --tiny", file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(
        f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}, {os.cpu_count()} cores", file=sys.stderr
    )
    if device.type == "cpu":
        torch.set_num_threads(1)  # products this small only wait for other threads
    run_parts(TINY if given.tiny else FULL, device, given.place)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
