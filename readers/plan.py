"""Which rows of which objects a batch needs, and the byte ranges that hold them. Pure arithmetic.

The values are named tuples, because a batch takes hundreds of them and a frozen dataclass takes four times as long to
make.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
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
    """A `SampleSpan` in its shard: it needs the chunks [first, last) of a row in each layer's object."""

    row: int
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


def plan_spans(grid: ShardGrid, spans: Sequence[SampleSpan], max_tokens: int) -> list[tuple[int, tuple[RowSpan, ...]]]:
    """Return (shard, spans) for groups of spans that are read by one request; empty ones are left out.

    Spans of neighbouring rows come together, in the rows' order, as far as ``max_tokens`` positions; a longer span is
    cut between chunks. The plan holds for every column and layer of the grid.
    """
    shard_size, step = grid.shard_size, grid.chunk_tokens
    most = max(step, max_tokens // step * step)
    by_shard: dict[int, list[RowSpan]] = {}
    for span in spans:
        if span.stop > span.start:
            shard, row = divmod(span.sample, shard_size)
            members = by_shard.setdefault(shard, [])
            if span.stop - span.start <= most:  # as nearly always
                members.append(RowSpan(row, span.start // step, -(-span.stop // step), span))
            else:
                members += [RowSpan(row, part.start // step, -(-part.stop // step), part) for part in _cut(span, most)]
    return [(shard, group) for shard, members in by_shard.items() for group in _groups(members, max_tokens)]


def _cut(span: SampleSpan, most: int) -> Iterator[SampleSpan]:
    """Yield a span in parts that end at multiples of ``most``; what follows the span goes with the last one."""
    start = span.start
    while start < span.stop:
        stop = min(span.stop, (start // most + 1) * most)
        place = span.place + start - span.start
        room = span.room if stop == span.stop else place + stop - start
        yield span._replace(start=start, stop=stop, place=place, room=room)
        start = stop


def _groups(members: list[RowSpan], max_tokens: int) -> Iterator[tuple[RowSpan, ...]]:
    if len(members) == 1:  # as nearly always, in a shuffled batch
        yield tuple(members)
        return
    group: list[RowSpan] = []
    tokens = 0
    for member in sorted(members, key=itemgetter(0, 1)):
        count = member.wanted.stop - member.wanted.start
        if group and (tokens + count > max_tokens or member.row > group[-1].row + 1):
            yield tuple(group)
            group, tokens = [], 0
        group.append(member)
        tokens += count
    yield tuple(group)


def object_reads(plan: Sequence[tuple[int, tuple[RowSpan, ...]]], slots: Sequence[int]) -> list[ObjectRead]:
    """Return the reads of a plan in the layer ``slots`` given."""
    return [ObjectRead(slot, layer, shard, spans) for shard, spans in plan for layer, slot in enumerate(slots)]


def byte_runs(bounds: np.ndarray, spans: tuple[RowSpan, ...], gap: int = 0) -> list[ByteRun]:
    """Return the byte ranges of the spans' whole chunks, in the order of the object.

    Those are merged that ``gap`` bytes at most lie between. ``bounds`` are the object's `ObjectTail.bounds`. ValueError
    naming a chunk that is absent.
    """
    if len(spans) == 1:  # as nearly always, in a shuffled batch
        return [_range_of(bounds, spans[0], spans)]
    ranges = sorted((_range_of(bounds, span, (span,)) for span in spans), key=itemgetter(0))
    starts = [at for at, run in enumerate(ranges) if at == 0 or not 0 <= run.begin - ranges[at - 1].end <= gap]
    return [
        ByteRun(ranges[start].begin, ranges[stop - 1].end, tuple(run.spans[0] for run in ranges[start:stop]))
        for start, stop in pairwise([*starts, len(ranges)])
    ]


def _range_of(bounds: np.ndarray, span: RowSpan, spans: tuple[RowSpan, ...]) -> ByteRun:
    row, first, last, _ = span
    end = bounds.item(row, last)
    if not end:  # the row ends before
        chunks = bounds.shape[1] - 1
        absent = int(np.argmin(bounds[row, 1:] > 0))
        raise ValueError(f"lacks the chunk in slot {row * chunks + max(first, absent)}")
    return ByteRun(bounds.item(row, first), end, spans)
