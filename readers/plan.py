"""Which rows of which objects a batch needs, and the byte ranges that hold them. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dspark_store.format.grid import ShardGrid


@dataclass(frozen=True, slots=True)
class SampleSpan:
    """Positions [start, stop) of a sample, and where they go in a batch.

    They land in row ``batch`` from position ``place`` on; what follows them up to position ``room`` becomes zero.
    """

    sample: int
    start: int
    stop: int
    batch: int
    place: int
    room: int


@dataclass(frozen=True, slots=True)
class RowSpan:
    """A `SampleSpan` in one object: the row of its shard that the sample is, and its place on the layer axis."""

    row: int
    layer: int
    wanted: SampleSpan


@dataclass(frozen=True, slots=True)
class ObjectRead:
    """What a batch needs of one object: the layer slot and shard that name it, and spans of its rows."""

    slot: int
    shard: int
    spans: tuple[RowSpan, ...]


@dataclass(frozen=True, slots=True)
class ByteRun:
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
            for layer, slot in enumerate(slots):
                rows = tuple(RowSpan(span.sample % grid.shard_size, layer, span) for span in group)
                yield ObjectRead(slot, shard, rows)


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


def chunk_range(grid: ShardGrid, span: RowSpan) -> tuple[int, int]:
    """Return the first and the past-the-last slot of a span's chunks in its shard."""
    first = span.row * grid.chunks_per_row
    return first + span.wanted.start // grid.chunk_tokens, first - (-span.wanted.stop // grid.chunk_tokens)


def byte_runs(grid: ShardGrid, offsets: np.ndarray, sizes: np.ndarray, spans: Sequence[RowSpan]) -> list[ByteRun]:
    """Return the byte ranges of the spans' whole chunks, in the order of the object, neighbours merged.

    ``offsets`` and ``sizes`` are the object's index, (slots,). ValueError naming the row when a chunk is absent or a
    row's chunks do not stand together.
    """
    ranges = sorted(((*_range_of(grid, offsets, sizes, span), span) for span in spans), key=lambda item: item[0])
    runs: list[ByteRun] = []
    for begin, end, span in ranges:
        if runs and runs[-1].end == begin:
            runs[-1] = ByteRun(runs[-1].begin, end, (*runs[-1].spans, span))
        else:
            runs.append(ByteRun(begin, end, (span,)))
    return runs


def _range_of(grid: ShardGrid, offsets: np.ndarray, sizes: np.ndarray, span: RowSpan) -> tuple[int, int]:
    first, last = chunk_range(grid, span)
    wanted = sizes[first:last].tolist()
    if not all(wanted):
        raise ValueError(f"lacks a chunk of row {span.row}")
    begin, end = int(offsets[first]), int(offsets[last - 1]) + wanted[-1]
    if end - begin != sum(wanted):
        raise ValueError(f"does not keep the chunks of row {span.row} together")
    return begin, end
