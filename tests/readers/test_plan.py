"""Plans cover what is wanted, no more, in as few ranges as the objects allow."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.format.grid import ShardGrid
from dspark_store.readers.plan import RowSpan, SampleSpan, byte_runs, padded_spans, plan_reads

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


@given(batches(), st.lists(st.integers(0, 5), max_size=4), st.integers(1, 60))
def test_every_wanted_span_is_read_once_in_every_layer(drawn, slots, max_tokens) -> None:
    grid, spans = drawn
    reads = list(plan_reads(grid, spans, slots, max_tokens))
    seen = Counter((read.layer, span.wanted) for read in reads for span in read.spans)
    assert seen == Counter((layer, span) for layer in range(len(slots)) for span in spans if span.stop > span.start)
    for read in reads:
        assert read.slot == slots[read.layer]
        assert {span.wanted.sample // grid.shard_size for span in read.spans} == {read.shard}


@given(batches(), st.integers(1, 60))
def test_a_read_is_small_enough_to_run_beside_others(drawn, max_tokens) -> None:
    grid, spans = drawn
    for read in plan_reads(grid, spans, [0], max_tokens):
        tokens = sum(span.wanted.stop - span.wanted.start for span in read.spans)
        assert tokens <= max_tokens or len(read.spans) == 1


@given(batches(), st.randoms())
def test_the_ranges_hold_exactly_the_wanted_chunks(drawn, random) -> None:
    grid, spans = drawn
    offsets, sizes = full_tail(grid, random.sample(range(grid.shard_size), grid.shard_size))
    for read in plan_reads(grid, spans, [0], EVERYTHING):
        wanted = {slot for span in read.spans for _, slot in chunks_of(grid, span.wanted)}
        planned = [slot for span in read.spans for slot in range(span.first, span.last)]
        assert set(planned) == wanted
        runs = byte_runs(offsets, sizes, read.spans)
        assert sum(run.end - run.begin for run in runs) == sum(int(sizes[slot]) for slot in planned)
        for run in runs:
            bounds = [
                (int(offsets[span.first]), int(offsets[span.last - 1] + sizes[span.last - 1])) for span in run.spans
            ]
            assert bounds[0][0] == run.begin
            assert [begin for begin, _ in bounds[1:]] == [end for _, end in bounds[:-1]]
            assert bounds[-1][1] == run.end


@given(grids.filter(lambda grid: grid.num_samples >= grid.shard_size), st.randoms())
def test_a_whole_shard_is_one_range_whatever_order_it_was_captured_in(grid, random) -> None:
    tail = full_tail(grid, random.sample(range(grid.shard_size), grid.shard_size))
    samples = random.sample(range(grid.shard_size), grid.shard_size)
    spans = padded_spans(samples, [grid.seq_length] * len(samples), 0, grid.seq_length)
    (read,) = plan_reads(grid, spans, [0], EVERYTHING)
    (run,) = byte_runs(*tail, read.spans)
    assert (run.begin, run.end) == (0, tail[1].sum())
    assert len(run.spans) == grid.shard_size


def test_neighbours_are_merged_and_others_are_not() -> None:
    grid = ShardGrid(10, 10, 4, 4)
    offsets, sizes = full_tail(grid, range(10))
    (read,) = plan_reads(grid, padded_spans([7, 2, 8, 3, 5], [4] * 5, 0, 4), [0], EVERYTHING)
    assert [[span.first for span in run.spans] for run in byte_runs(offsets, sizes, read.spans)] == [
        [2, 3],
        [5],
        [7, 8],
    ]


def test_a_shuffled_batch_of_eight_takes_one_range_a_layer_and_sample() -> None:
    grid = ShardGrid(1_000_000, 250, 2048, 64)
    samples = np.random.default_rng(0).choice(grid.num_samples, 8, replace=False).tolist()
    tail = full_tail(grid, range(250))
    reads = list(plan_reads(grid, padded_spans(samples, [2048] * 8, 0, 2048), range(6), EVERYTHING))
    assert len(reads) == len({sample // 250 for sample in samples}) * 6
    assert sum(len(byte_runs(*tail, read.spans)) for read in reads) == 48


def test_layers_share_the_spans_of_their_shard() -> None:
    reads = list(plan_reads(ShardGrid(8, 4, 8, 4), padded_spans([1, 2], [8, 8], 0, 8), [3, 0], EVERYTHING))
    assert [(read.slot, read.layer) for read in reads] == [(3, 0), (0, 1)]
    assert reads[0].spans is reads[1].spans


def test_a_chunk_that_is_absent_is_an_error() -> None:
    offsets, sizes = full_tail(ShardGrid(2, 2, 12, 4), range(2))
    sizes[4] = 0
    with pytest.raises(ValueError, match="lacks the chunk in slot 4"):
        byte_runs(offsets, sizes, [RowSpan(3, 6, SampleSpan(1, 0, 12, 0, 0, 12))])


def test_chunks_of_a_row_that_lie_apart_are_an_error() -> None:
    offsets, sizes = full_tail(ShardGrid(2, 2, 12, 4), range(2))
    offsets[5] += 8
    with pytest.raises(ValueError, match="does not keep the chunks in slots 3 to 5 together"):
        byte_runs(offsets, sizes, [RowSpan(3, 6, SampleSpan(1, 0, 12, 0, 0, 12))])


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 30)), max_size=6), st.integers(0, 30), st.integers(0, 30))
def test_padded_spans_end_where_their_samples_do(samples, start, width) -> None:
    numbers, lengths = [sample for sample, _ in samples], [length for _, length in samples]
    spans = padded_spans(numbers, lengths, start, start + width)
    assert [(span.sample, span.batch, span.start, span.place, span.room) for span in spans] == [
        (sample, batch, start, 0, width) for batch, sample in enumerate(numbers)
    ]
    for span, length in zip(spans, lengths, strict=True):
        assert list(range(span.start, span.stop)) == [at for at in range(start, start + width) if at < length]
