"""What writing costs a capture: time and memory beside the same forwards without it.

The target is a stand-in that gives six states per token, of five layers and the last one, none of them shared: real
matrix products on all cores, calibrated to a number of tokens per second, or one that only sleeps, as a GPU leaves the
processor alone. Part of ``python -m benchmarks.writers``.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.captures import BUFFER_BYTES, CaptureWork, new_workload, run_forwards, run_writing
from benchmarks.costs import CPU, elapsed, in_own_process, peak_of
from benchmarks.samples import BF16, new_schema, synthetic_states
from benchmarks.tables import Column, PeerComparison, Table
from dspark_store.format.dtypes import tensor_bits
from dspark_store.format.schema import StoreSchema
from dspark_store.precompute.capture import CaptureSettings
from dspark_store.target.capture import StageCapture, StageStates

MIB = 2**20
LAYERS, LENGTH, BATCH, VOCAB = 5, 128, 4, 1000
PEAK_SAMPLES = 32
IDLE_WIDTH, IDLE_SAMPLES, IDLE_SHARDS = 1024, 640, (64, 16)
"""H and the samples of a target that sleeps, and their shards: ten and forty."""
HURRIED = 4
"""So many times the samples, where the target takes no time."""
IDLE_RATE = 100e6
"""Bytes of states per second that such a target gives."""


@dataclass(frozen=True, slots=True)
class CaptureCase:
    """One measurement: H and codec of the store, its samples, products of the stand-in, samples per shard (0: all)."""

    width: int
    codec: str
    samples: int
    products: int = 0
    shard_size: int = 0

    def workload(self, place: Path) -> CaptureWork:
        """Make the store in ``place``."""
        schema = new_schema(0, self.shard_size or self.samples, LENGTH, self.width, range(LAYERS), self.codec)
        # the target's last layer is the one after those captured: what shares no object costs the most
        settings = CaptureSettings(CPU, BATCH, 0, LAYERS, stop_on_nonfinite=False)
        lengths = [LENGTH] * self.samples
        return new_workload(place, schema, lengths, settings, vocab_size=VOCAB, encode_threads=_cores())

    def stand_in(self) -> StandIn:
        """Return the target."""
        return StandIn(self.width, self.products)


class StandIn:
    """A capture whose forward multiplies all positions by an (H, H) float32 matrix, ``products`` times.

    Its states, bfloat16, are copied from a pool into memory of their own, as a forward would leave them.
    """

    def __init__(self, width: int, products: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.products = products
        self._weights = torch.randn(width, width, generator=generator) / width**0.5
        self._features = torch.randn(BATCH * LENGTH, width, generator=generator)
        self._pool = synthetic_states(BATCH * LENGTH + LAYERS, width)

    def __call__(self, ids: torch.Tensor, attention: torch.Tensor) -> StageStates:
        """Run one batch of any ids, (B, S)."""
        count = ids.numel()
        features = self._features[:count]
        for _ in range(self.products):
            features = features @ self._weights
        states = [self._pool[layer : layer + count].clone().view(*ids.shape, -1) for layer in range(LAYERS + 1)]
        return StageStates(tuple(range(LAYERS)), tuple(states[:-1]), states[-1])

    def seconds_of_product(self) -> float:
        """Return how long one product of a whole batch takes: the least of several, which nobody disturbed."""
        product = partial(torch.mm, self._features, self._weights)
        return min(elapsed(product, CPU).clock for _ in range(9))


class SleepingTarget:
    """A capture that uses no processor: it sleeps for the seconds of a batch, and gives states where they lie."""

    def __init__(self, width: int, seconds: float) -> None:
        self._seconds = seconds
        self._pool = synthetic_states(BATCH * LENGTH + LAYERS, width)

    def __call__(self, ids: torch.Tensor, attention: torch.Tensor) -> StageStates:
        """Run one batch of any ids, (B, S)."""
        time.sleep(self._seconds)
        count = ids.numel()
        states = [self._pool[layer : layer + count].view(*ids.shape, -1) for layer in range(LAYERS + 1)]
        return StageStates(tuple(range(LAYERS)), tuple(states[:-1]), states[-1])

    def rows(self) -> Iterator[torch.Tensor]:
        """Yield the states of each sample and layer of a batch, (128, H)."""
        for layer in range(LAYERS + 1):
            yield from torch.split(self._pool[layer : layer + BATCH * LENGTH], LENGTH)


def encode_plainly(schema: StoreSchema, rows: Iterable[torch.Tensor], threads: int) -> None:
    """Encode the chunks of rows of states, (length, H) each, with the codec alone, and drop them."""
    chain, step = schema.chain("target_last_hidden_states"), schema.chunk_tokens
    tasks = [tensor_bits(states[first : first + step]) for states in rows for first in range(0, len(states), step)]
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(chain.compressor.compress, tasks):
            pass


def calibrated(case: CaptureCase, tokens_per_second: float) -> CaptureCase:
    """Return the case with as many products as give about this rate."""
    wanted = BATCH * LENGTH / tokens_per_second / case.stand_in().seconds_of_product()
    return replace(case, products=max(1, round(wanted)))


@dataclass(frozen=True, slots=True)
class CostRatios:
    """Pairs of runs with writing and of forwards alone: their ratios by the clock and by processor time."""

    tokens_per_second: float
    clock: tuple[float, ...]
    processor: tuple[float, ...]


def measure_cost(case: CaptureCase, place: Path, pairs: int) -> CostRatios:
    """Run both by turns, ``pairs`` times each, in an order that changes from pair to pair."""
    torch.set_num_threads(_cores())
    workload, capture = case.workload(place / "tokens"), case.stand_in()
    run_forwards(workload, capture)
    alone, writing = [], []
    for pair in range(pairs):
        target = workload.copied(place / "states")
        for writes in (pair % 2 == 0, pair % 2 == 1):
            if writes:
                writing.append(elapsed(partial(run_writing, target, capture), CPU))
            else:
                alone.append(elapsed(partial(run_forwards, workload, capture), CPU))
        shutil.rmtree(place / "states")
    both = list(zip(writing, alone, strict=True))
    return CostRatios(
        workload.tokens / median(run.clock for run in alone),
        tuple(ours.clock / theirs.clock for ours, theirs in both),
        tuple(ours.processor / theirs.processor for ours, theirs in both),
    )


def measure_peak(case: CaptureCase, place: Path, writes: bool) -> int:
    """Return the peak resident bytes of this process over one run, with writing or without."""
    torch.set_num_threads(_cores())
    workload, capture = case.workload(place), case.stand_in()
    run: Callable[[CaptureWork, StageCapture], object] = run_writing if writes else run_forwards
    return peak_of(lambda: run(workload, capture))


def peak_over_forward(case: CaptureCase, place: Path, runs: int = 3) -> float:
    """Return what writing adds to the peak of the same forwards: medians of processes of their own."""
    writing, alone = (
        median(in_own_process(measure_peak, case, place / f"{writes}-{run}", writes) for run in range(runs))
        for writes in (True, False)
    )
    return writing - alone


def cost_table(width: int, codec: str, place: Path, *, pairs: int, tokens_per_second: float, samples: int) -> Table:
    """Measure what writing costs. ``samples`` have 128 tokens each."""
    torch.set_num_threads(_cores())
    case = calibrated(CaptureCase(width, codec, samples), tokens_per_second)
    cost = measure_cost(case, place, pairs)
    rows: list[tuple[str, float, float | None, float | None, float | None]] = []
    comparisons = []
    for unit, ratios, aim in (("clock", cost.clock, 1.05), ("processor", cost.processor, None)):
        ratio = median(ratios)
        rows.append((f"with writing / forward alone, {unit}", ratio, min(ratios), max(ratios), aim))
        comparisons.append(
            PeerComparison("writing during a capture", f"a forward with writing, {unit}", "without", 1 / ratio)
        )
    small, hurried = replace(case, samples=PEAK_SAMPLES), replace(case, samples=4 * PEAK_SAMPLES, products=0)
    for what, of in (("that forward", small), ("one that takes no time", hurried)):
        peak = peak_over_forward(of, place / f"peak-{of.products}") / MIB
        rows.append((f"peak memory above {what}, MiB", peak, None, None, 256 + BUFFER_BYTES // MIB))
    columns = (Column("what"), *(Column(name, ",.3f") for name in ("median", "least", "most")), Column("aim", ",g"))
    note = (
        f"A forward of {cost.tokens_per_second:.0f} tokens/s, {(LAYERS + 1) * width * 2 / 1000:.0f} KB of states a "
        f"token, {pairs} pairs."
    )
    return Table("What writing costs a capture", columns, tuple(rows), (note,), tuple(comparisons))


def idle_table(place: Path, *, pairs: int, rate: float = IDLE_RATE, samples: int = IDLE_SAMPLES) -> Table:
    """Measure what writing costs a target that sleeps, and what it reaches of the encoders' rate where that is less."""
    torch.set_num_threads(_cores())
    batch_bytes = BATCH * LENGTH * (LAYERS + 1) * IDLE_WIDTH * BF16.itemsize
    rows: list[tuple[str, float, float, float, float]] = []
    comparisons = []
    for shard_size in IDLE_SHARDS:
        for codec in ("none", "default"):
            case = CaptureCase(IDLE_WIDTH, codec, samples, shard_size=shard_size)
            workload = case.workload(place / f"{shard_size}-{codec}")
            paced, hurried = (SleepingTarget(IDLE_WIDTH, seconds) for seconds in (batch_bytes / rate, 0.0))
            ours = [_seconds_of_writing(workload, paced, place / "states") for _ in range(pairs)]
            alone = [elapsed(partial(run_forwards, workload, paced), CPU).clock for _ in range(pairs)]
            ratios = [mine / theirs for mine, theirs in zip(ours, alone, strict=True)]
            name = f"R={shard_size}, codec {codec}"
            rows.append((f"{name}: with writing / without", median(ratios), min(ratios), max(ratios), 1.03))
            comparisons.append(PeerComparison("writing behind a target that sleeps", name, "without", 1 / rows[-1][1]))
            if codec != "none":
                limits = []
                more = replace(case, samples=HURRIED * samples).workload(place / f"{shard_size}-hurried")
                for _ in range(pairs):
                    written = _seconds_of_writing(more, hurried, place / "states")
                    plain = (row for _ in range(HURRIED * samples // BATCH) for row in hurried.rows())
                    encode = partial(encode_plainly, workload.record.schema, plain, _cores())
                    limits.append(elapsed(encode, CPU).clock / written)
                rows.append((f"{name}: of the encoders' rate", median(limits), min(limits), max(limits), 0.9))
    columns = (Column("what"), *(Column(name, ",.3f") for name in ("median", "least", "most")), Column("aim", ",g"))
    note = (
        f"H={IDLE_WIDTH}, {samples} samples of {LENGTH} tokens; the target sleeps for the time in which it gives "
        f"{rate / 1e6:.0f} MB of states per second. The encoders' rate is that of {_cores()} plain threads and the "
        f"codec alone; the target of that row takes no time, and its samples are {HURRIED} times as many. "
        f"{pairs} runs each."
    )
    return Table(
        "What writing costs a target that uses no processor", columns, tuple(rows), (note,), tuple(comparisons)
    )


def _seconds_of_writing(workload: CaptureWork, target: StageCapture, place: Path) -> float:
    copy = workload.copied(place)
    seconds = elapsed(partial(run_writing, copy, target), CPU).clock
    shutil.rmtree(place)
    return seconds


def _cores() -> int:
    return os.cpu_count() or 1
