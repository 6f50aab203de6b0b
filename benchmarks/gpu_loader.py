"""The loader on a GPU: pinned memory and copies on a side stream, beside plain reads and plain copies."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.captures import elapsed
from benchmarks.gpu import Row
from dspark_store import CacheLoader, open_cache
from dspark_store.format.schema import LAST, LAYERS

type Batch = dict[str, torch.Tensor]
type Source = Callable[[], Iterator[Batch]]

COMPARED, STEP_BATCHES, REPEATS = 4, 16, 3


def new_loader(store: Path, batch_size: int, device: torch.device) -> CacheLoader:
    """Return a loader whose batches arrive on the device."""
    return CacheLoader(open_cache(store), batch_size, layout="stacked", dp_rank=0, dp_size=1, device=device)


def plain_batches(store: Path, batch_size: int, device: torch.device) -> Iterator[Batch]:
    """Yield the loader's batches, read when they are asked for into pageable memory and copied from there."""
    loader = new_loader(store, batch_size, device)
    cache, order = loader.cache, loader.epoch_samples()
    for first in range(0, len(order), batch_size):
        batch = cache.read(order[first : first + batch_size].tolist(), layout="stacked")
        yield {name: values.to(device) for name, values in batch.items()}


class Step:
    """A training step's stand-in on the device: ``products`` matrix products."""

    def __init__(self, device: torch.device) -> None:
        width, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (128, torch.float32)
        self._device = device
        self._matrix = torch.randn(width, width, device=device, dtype=dtype) / width**0.5
        self.products = 1

    def calibrate(self, seconds: float) -> None:
        """Take as many products as last about ``seconds``."""
        self.products = 8
        once = median_seconds(self, self._device) / self.products
        self.products = max(1, round(seconds / once))

    def __call__(self) -> None:
        """Queue the products."""
        values = self._matrix
        for _ in range(self.products):
            values = values @ self._matrix


def consume(batches: Iterator[Batch], step: Callable[[], None], limit: int) -> int:
    """Take up to ``limit`` batches, a step after each, and look at a value of each; return their states' bytes."""
    nbytes = 0
    for count, batch in enumerate(batches, 1):
        step()
        float(batch[LAST][..., 0].sum())
        nbytes += batch[LAYERS].nbytes + batch[LAST].nbytes
        if count == limit:
            break
    return nbytes


def _epoch(source: Source, batches: int) -> None:
    consume(source(), _nothing, batches)


def median_seconds(action: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a few calls by the clock."""
    return statistics.median(elapsed(action, device).clock for _ in range(REPEATS))


def measure_loader(store: Path, batch_size: int, device: torch.device) -> Iterator[Row]:
    """Read epochs with nothing to do between batches, both ways; then compare some batches with plain reads."""
    batches = len(new_loader(store, batch_size, device))
    sources: dict[str, Source] = {
        "plain reads and copies": lambda: plain_batches(store, batch_size, device),
        "loader, copies on a side stream": lambda: iter(new_loader(store, batch_size, device)),
    }
    rates = []
    for name, source in sources.items():
        nbytes = consume(source(), _nothing, batches)
        seconds = median_seconds(partial(_epoch, source, batches), device)
        rates.append(batches * batch_size / seconds)
        yield Row(name, rates[-1], "samples/s")
        yield Row(f"{name}, states", nbytes / seconds / 1e9, "GB/s")
    yield Row("loader / plain", rates[1] / rates[0], "x")
    different = _differing_batches(store, batch_size, device)
    yield Row("batches that differ on the device", different, "", passed=different == 0)


def _differing_batches(store: Path, batch_size: int, device: torch.device) -> int:
    """Count batches of an epoch that are not what a plain read gives, while steps keep the device busy."""
    step, different, cache = Step(device), 0, open_cache(store)
    step.products = 20
    for count, batch in enumerate(new_loader(store, batch_size, device)):
        step()
        if count % max(1, len(cache) // batch_size // COMPARED) == 0:
            wanted = cache.read(batch["sample"].tolist(), layout="stacked")
            different += not all(_same_bits(batch[name].cpu(), values) for name, values in wanted.items())
    return different


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def measure_step(store: Path, batch_size: int, device: torch.device) -> Iterator[Row]:
    """Put a step of about a plain read's time after each batch, and see what of the reading it hides."""
    limit = min(STEP_BATCHES, len(new_loader(store, batch_size, device)))
    step = Step(device)
    reading = elapsed(lambda: consume(plain_batches(store, batch_size, device), _nothing, limit), device).clock
    step.calibrate(reading / limit)

    def milliseconds(batches: Source) -> float:
        return median_seconds(lambda: consume(batches(), step, limit), device) / limit * 1e3

    alone = statistics.median(elapsed(step, device).clock for _ in range(limit)) * 1e3
    plain = milliseconds(lambda: plain_batches(store, batch_size, device))
    loaded = milliseconds(lambda: iter(new_loader(store, batch_size, device)))
    yield Row("a step alone", alone, "ms")
    yield Row("a step with plain reads and copies", plain, "ms")
    yield Row("a step with the loader", loaded, "ms")
    if plain > alone:
        yield Row("share of the reading that is hidden", min(1.0, max(0.0, 1 - (loaded - alone) / (plain - alone))), "")


def _nothing() -> None:
    """Stand in for a step that takes no time."""
