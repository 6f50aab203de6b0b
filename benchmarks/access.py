"""How training and other work read a store: the requests of each access pattern, the same for every setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.samples import Samples
from dspark_store.readers.plan import SampleSpan

BATCH, SPAN = 8, 128
ACCESSES = {
    "sample": "random whole samples, all layers, in batches",
    "scattered": "the same, every object opened anew, as in a store of far more objects than are kept open",
    "span": f"random spans of {SPAN} positions, all layers, in batches",
    "sequential": "whole samples in the order of the store, all layers, in batches",
    "layer": "one layer of random whole samples, in batches",
}


@dataclass(frozen=True, slots=True)
class Request:
    """One batch: its spans, ``positions`` long, and the layer that is wanted of them, or None for all."""

    spans: tuple[SampleSpan, ...]
    positions: int
    layer: int | None = None

    @property
    def valid(self) -> int:
        """Positions that are of a sample, and not padding."""
        return sum(span.stop - span.start for span in self.spans)

    def wanted_bytes(self, samples: Samples) -> int:
        """Return the bytes of states that were asked for, without padding."""
        return self.valid * samples.vector_bytes * (samples.layers if self.layer is None else 1)


def requests(access: str, samples: Samples, batches: int) -> list[Request]:
    """Return the batches of an access pattern."""
    generator = np.random.Generator(np.random.PCG64(2))
    count, size = len(samples.lengths), min(BATCH, len(samples.lengths))
    order: list[int] = []
    while len(order) < batches * size:
        order += range(count) if access == "sequential" else generator.permutation(count).tolist()
    made = []
    for at in range(batches):
        rows = order[at * size : (at + 1) * size]
        layer = at % samples.layers if access == "layer" else None
        if access == "span":
            starts = [int(generator.integers(0, max(1, samples.lengths[row] - SPAN + 1))) for row in rows]
            made.append(_request(samples, rows, starts, SPAN, layer))
        else:
            made.append(_request(samples, rows, [0] * size, samples.seq_length, layer))
    return made


def _request(samples: Samples, rows: Sequence[int], starts: Sequence[int], most: int, layer: int | None) -> Request:
    """Return a batch as long as its longest span."""
    stops = [min(samples.lengths[row], start + most) for row, start in zip(rows, starts, strict=True)]
    longest = max(stop - start for start, stop in zip(starts, stops, strict=True))
    spans = (
        SampleSpan(row, start, stop, batch, 0, longest)
        for batch, (row, start, stop) in enumerate(zip(rows, starts, stops, strict=True))
    )
    return Request(tuple(spans), longest, layer)
