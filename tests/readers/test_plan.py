"""Plans cover what is wanted, no more, in as few ranges as the objects allow."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.format.grid import ShardGrid
from dspark_store.format.shard import chunk_bounds
from dspark_store.readers.plan import (
    RowSpan,
    SampleSpan,
    byte_runs,
    object_reads,
    padded_spans,
    plan_spans,
)

EVERYTHING = 2**40

grids = st.builds(ShardGrid, st.integers(1, 40), st.integers(1, 7), st.integers(1, 30), st.integers(1, 9))


@st.composite
def batches(draw: st.DrawFn) -> tuple[ShardGrid, list[SampleSpan]]:
    """Spans of any samples of a grid: any number of them, any positions, some of none."""
    grid = draw(grids)
    spans = []
    for batch in range(draw(st.integers(0, 9))):
        start, stop = sorted(draw(st.tuples(*[st.integers(0, grid.seq_length)] * 2)))
        spans.append(SampleSpan(draw(st.integers(0, grid.num_samples - 1)), start, stop, batch, 0, stop - start))
    return grid, spans


def full_tail(grid: ShardGrid, order: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and sizes of an object whose rows, all of full length, were captured in an order."""
    slots = np.arange(grid.slots).reshape(grid.shard_size, -1)[list(order)].ravel()
    sizes = (np.arange(grid.slots) * 7 % 11 + 1).astype(np.uint32)
    offsets = np.zeros(grid.slots, np.uint64)
    offsets[slots] = np.cumsum(sizes[slots]) - sizes[slots]
    return offsets, sizes


def chunks_of(grid: ShardGrid, span: SampleSpan) -> set[tuple[int, int]]:
    """The chunks that hold a span's positions, as (shard, slot)."""
    shard, row = grid.locate(span.sample)
    return {(shard, row * grid.chunks_per_row + at // grid.chunk_tokens) for at in range(span.start, span.stop)}


def slots_of(grid: ShardGrid, span: RowSpan) -> range:
    """The slots of a span's chunks."""
    return range(span.row * grid.chunks_per_row + span.first, span.row * grid.chunks_per_row + span.last)


@given(batches(), st.lists(st.integers(0, 5), max_size=4), st.integers(1, 60))
def test_every_wanted_span_is_read_once_in_every_layer(drawn, slots, max_tokens) -> None:
    grid, spans = drawn
    reads = object_reads(plan_spans(grid, spans, max_tokens), slots)

    def positions(layer: int, span: SampleSpan) -> list[tuple[int, ...]]:
        wanted = range(span.stop - span.start)
        return [(layer, span.sample, span.start + at, span.batch, span.place + at) for at in wanted]

    parts = [(read.layer, span.wanted) for read in reads for span in read.spans]
    seen = Counter(position for part in parts for position in positions(*part))
    assert seen == Counter(
        position for layer in range(len(slots)) for span in spans for position in positions(layer, span)
    )
    filled = Counter(
        (part.batch, at) for _, part in parts for at in range(part.place + part.stop - part.start, part.room)
    )
    kept = [span for span in spans if span.stop > span.start]
    assert filled == Counter(
        (span.batch, at) for _ in slots for span in kept for at in range(span.place + span.stop - span.start, span.room)
    )
    for read in reads:
        assert read.slot == slots[read.layer]
        assert {span.wanted.sample // grid.shard_size for span in read.spans} == {read.shard}


@given(batches(), st.integers(1, 60))
def test_a_read_is_small_enough_to_run_beside_others(drawn, max_tokens) -> None:
    grid, spans = drawn
    for _, group in plan_spans(grid, spans, max_tokens):
        tokens = sum(span.wanted.stop - span.wanted.start for span in group)
        assert tokens <= max_tokens or len(group) == 1


@given(batches(), st.randoms())
def test_the_ranges_hold_exactly_the_wanted_chunks(drawn, random) -> None:
    grid, spans = drawn
    offsets, sizes = full_tail(grid, random.sample(range(grid.shard_size), grid.shard_size))
    bounds = chunk_bounds(offsets, sizes, grid.chunks_per_row)
    for _, group in plan_spans(grid, spans, EVERYTHING):
        wanted = {slot for span in group for _, slot in chunks_of(grid, span.wanted)}
        planned = [slot for span in group for slot in slots_of(grid, span)]
        assert set(planned) == wanted
        runs = byte_runs(bounds, group)
        assert sum(run.end - run.begin for run in runs) == sum(int(sizes[slot]) for slot in planned)
        for run in runs:
            slots = [slots_of(grid, span) for span in run.spans]
            ranges = [(int(offsets[mine[0]]), int(offsets[mine[-1]] + sizes[mine[-1]])) for mine in slots]
            assert ranges[0][0] == run.begin
            assert [begin for begin, _ in ranges[1:]] == [end for _, end in ranges[:-1]]
            assert ranges[-1][1] == run.end


@given(grids.filter(lambda grid: grid.num_samples >= grid.shard_size), st.randoms())
def test_a_whole_shard_is_one_range_whatever_order_it_was_captured_in(grid, random) -> None:
    offsets, sizes = full_tail(grid, random.sample(range(grid.shard_size), grid.shard_size))
    samples = random.sample(range(grid.shard_size), grid.shard_size)
    spans = padded_spans(samples, [grid.seq_length] * len(samples), 0, grid.seq_length)
    ((_, group),) = plan_spans(grid, spans, EVERYTHING)
    (run,) = byte_runs(chunk_bounds(offsets, sizes, grid.chunks_per_row), group)
    assert (run.begin, run.end) == (0, sizes.sum())
    assert len(run.spans) == grid.shard_size


def test_neighbours_are_merged_and_others_are_not() -> None:
    grid = ShardGrid(10, 10, 4, 4)
    bounds = chunk_bounds(*full_tail(grid, range(10)), 1)
    plan = plan_spans(grid, padded_spans([7, 2, 8, 3, 5], [4] * 5, 0, 4), EVERYTHING)
    assert [[span.row for span in group] for _, group in plan] == [[2, 3], [5], [7, 8]]
    assert [len(byte_runs(bounds, group)) for _, group in plan] == [1, 1, 1]


def test_a_gap_is_read_with_its_neighbours_while_it_is_small() -> None:
    grid = ShardGrid(2, 2, 8, 4)
    bounds = chunk_bounds(*full_tail(grid, range(2)), 2)
    ((_, group),) = plan_spans(grid, padded_spans([0, 1], [8] * 2, 0, 4), EVERYTHING)
    gap = int(bounds[1, 0] - bounds[0, 1])
    assert [len(byte_runs(bounds, group, bytes_)) for bytes_ in (gap, gap - 1)] == [1, 2]


def test_a_shuffled_batch_of_eight_takes_one_range_a_layer_and_sample() -> None:
    grid = ShardGrid(1_000_000, 250, 2048, 64)
    samples = np.random.default_rng(0).choice(grid.num_samples, 8, replace=False).tolist()
    bounds = chunk_bounds(*full_tail(grid, range(250)), grid.chunks_per_row)
    reads = object_reads(plan_spans(grid, padded_spans(samples, [2048] * 8, 0, 2048), EVERYTHING), range(6))
    assert len(reads) == len({sample // 250 for sample in samples}) * 6
    assert sum(len(byte_runs(bounds, read.spans)) for read in reads) == 48


def test_layers_share_the_spans_of_their_shard() -> None:
    reads = object_reads(plan_spans(ShardGrid(8, 4, 8, 4), padded_spans([1, 2], [8, 8], 0, 8), EVERYTHING), [3, 0])
    assert [(read.slot, read.layer) for read in reads] == [(3, 0), (0, 1)]
    assert reads[0].spans is reads[1].spans


@given(grids, st.data())
def test_bounds_say_where_every_stored_chunk_lies(grid, data) -> None:
    """Rows of any length, in the order of their numbers; offsets below 2^32 and past it."""
    stored = data.draw(
        st.lists(st.integers(0, grid.chunks_per_row), min_size=grid.shard_size, max_size=grid.shard_size)
    )
    start = data.draw(st.sampled_from([0, 2**32]))
    sizes = np.where(np.arange(grid.chunks_per_row) < np.array(stored)[:, None], 7, 0).astype(np.uint64).ravel()
    offsets = np.where(sizes > 0, start + np.cumsum(sizes) - sizes, 0).astype(np.uint64)
    bounds = chunk_bounds(offsets, sizes, grid.chunks_per_row)
    assert bounds.dtype.itemsize <= 4 or start
    for row, count in enumerate(stored):
        first = row * grid.chunks_per_row
        assert bounds[row, :count].tolist() == offsets[first : first + count].tolist()
        assert bounds[row, 1 : count + 1].tolist() == (offsets + sizes)[first : first + count].tolist()
        assert not bounds[row, count + 1 :].any()


@pytest.mark.parametrize(("stored", "absent"), [(2, 5), (1, 4), (0, 3)])
def test_a_chunk_that_is_absent_is_an_error(stored: int, absent: int) -> None:
    offsets, sizes = full_tail(ShardGrid(2, 2, 12, 4), range(2))
    offsets[3 + stored :] = sizes[3 + stored :] = 0
    span = RowSpan(1, 0, 3, SampleSpan(1, 0, 12, 0, 0, 12))
    with pytest.raises(ValueError, match=f"lacks the chunk in slot {absent}"):
        byte_runs(chunk_bounds(offsets, sizes, 3), (span,))


@pytest.mark.parametrize(("slot", "moved"), [(4, 8), (5, 8), (5, -1)])
def test_chunks_of_a_row_that_lie_apart_are_an_error(slot: int, moved: int) -> None:
    offsets, sizes = full_tail(ShardGrid(2, 2, 12, 4), range(2))
    offsets[slot] = int(offsets[slot]) + moved
    with pytest.raises(ValueError, match="does not keep the chunks in slots 3 to 5 together"):
        chunk_bounds(offsets, sizes, 3)


def test_a_chunk_after_an_absent_one_is_an_error() -> None:
    offsets, sizes = full_tail(ShardGrid(2, 2, 12, 4), range(2))
    offsets[1] = sizes[1] = 0
    with pytest.raises(ValueError, match="does not keep the chunks in slots 0 to 2 together"):
        chunk_bounds(offsets, sizes, 3)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 30)), max_size=6), st.integers(0, 30), st.integers(0, 30))
def test_padded_spans_end_where_their_samples_do(samples, start, width) -> None:
    numbers, lengths = [sample for sample, _ in samples], [length for _, length in samples]
    spans = padded_spans(numbers, lengths, start, start + width)
    assert [(span.sample, span.batch, span.start, span.place, span.room) for span in spans] == [
        (sample, batch, start, 0, width) for batch, sample in enumerate(numbers)
    ]
    for span, length in zip(spans, lengths, strict=True):
        assert list(range(span.start, span.stop)) == [at for at in range(start, start + width) if at < length]
