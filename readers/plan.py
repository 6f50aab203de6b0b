"""Which rows of which objects a batch needs, and the byte ranges that hold them. Pure arithmetic.

The values are named tuples, because a batch takes hundreds of them and a frozen dataclass takes four times as long to
make.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from dspark_store.format.grid import ShardGrid


class SampleSpan(NamedTuple):
    """Positions [start, stop) of a sample, and where they go in a batch.

    They land in row ``batch`` from position ``place`` on; what follows them up to position ``room`` becomes zero.
    """

    sample: int
    start: int
    stop: int
    batch: int
    place: int
    room: int


class RowSpan(NamedTuple):
    """A `SampleSpan` in its shard: it needs the chunks in the slots [first, last) of each layer's object."""

    first: int
    last: int
    wanted: SampleSpan


class ObjectRead(NamedTuple):
    """What a batch needs of one object: the layer slot and shard that name it, and spans of its rows.

    ``layer`` is where the layer stands in the batch.
    """

    slot: int
    layer: int
    shard: int
    spans: tuple[RowSpan, ...]


class ByteRun(NamedTuple):
    """A contiguous range of an object's bytes, [begin, end), and the spans whose chunks it holds, in that order."""

    begin: int
    end: int
    spans: tuple[RowSpan, ...]


def padded_spans(samples: Sequence[int], lengths: Sequence[int], start: int, stop: int) -> list[SampleSpan]:
    """Return the spans of a batch that has a row a sample and the positions [start, stop); empty ones included."""
    ends = (max(start, min(stop, length)) for length in lengths)
    return [
        SampleSpan(sample, start, end, batch, 0, stop - start)
        for batch, (sample, end) in enumerate(zip(samples, ends, strict=True))
    ]


def plan_reads(
    grid: ShardGrid, spans: Sequence[SampleSpan], slots: Sequence[int], max_tokens: int
) -> Iterator[ObjectRead]:
    """Yield the reads of some spans in the layer ``slots`` given; an empty span needs none.

    Spans of one object come together, at most ``max_tokens`` positions (and at least one span) a read, so that reads
    can run side by side.
    """
    by_shard: dict[int, list[SampleSpan]] = {}
    for span in spans:
        if span.stop > span.start:
            by_shard.setdefault(span.sample // grid.shard_size, []).append(span)
    for shard, members in by_shard.items():
        for group in _groups(members, max_tokens):
            rows = tuple([_row_span(grid, span) for span in group])
            for layer, slot in enumerate(slots):
                yield ObjectRead(slot, layer, shard, rows)


def _row_span(grid: ShardGrid, span: SampleSpan) -> RowSpan:
    slot = span.sample % grid.shard_size * grid.chunks_per_row
    return RowSpan(slot + span.start // grid.chunk_tokens, slot - (-span.stop // grid.chunk_tokens), span)


def _groups(members: Sequence[SampleSpan], max_tokens: int) -> Iterator[Sequence[SampleSpan]]:
    group: list[SampleSpan] = []
    tokens = 0
    for member in members:
        count = member.stop - member.start
        if group and tokens + count > max_tokens:
            yield group
            group, tokens = [], 0
        group.append(member)
        tokens += count
    if group:
        yield group


def byte_runs(offsets: np.ndarray, sizes: np.ndarray, spans: Sequence[RowSpan]) -> list[ByteRun]:
    """Return the byte ranges of the spans' whole chunks, in the order of the object, neighbours merged.

    ``offsets`` and ``sizes`` are the object's index, (slots,). ValueError naming the chunks when one is absent or they
    do not stand together.
    """
    if len(spans) == 1:  # as nearly always, in a shuffled batch
        return [ByteRun(*_range_of(offsets, sizes, spans[0]), tuple(spans))]
    ranges = [(*_range_of(offsets, sizes, span), span) for span in spans]
    ranges.sort(key=itemgetter(0))
    runs: list[ByteRun] = []
    joined: list[RowSpan] = []
    begin = end = 0
    for low, high, span in ranges:
        if joined and low != end:
            runs.append(ByteRun(begin, end, tuple(joined)))
            joined = []
        if not joined:
            begin = low
        joined.append(span)
        end = high
    if joined:
        runs.append(ByteRun(begin, end, tuple(joined)))
    return runs


def _range_of(offsets: np.ndarray, sizes: np.ndarray, span: RowSpan) -> tuple[int, int]:
    wanted = sizes[span.first : span.last].tolist()
    if 0 in wanted:
        raise ValueError(f"lacks the chunk in slot {span.first + wanted.index(0)}")
    begin, end = offsets.item(span.first), offsets.item(span.last - 1) + wanted[-1]
    if end - begin != sum(wanted):
        raise ValueError(f"does not keep the chunks in slots {span.first} to {span.last - 1} together")
    return begin, end
