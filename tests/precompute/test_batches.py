"""Which rows share a forward."""

from itertools import chain, pairwise

from hypothesis import given
from hypothesis import strategies as st

from dspark_store.precompute.batches import batches_of, forward_cost

lengths_of_rows = st.lists(st.integers(0, 50), max_size=40)
sizes = st.integers(1, 9)


@given(lengths_of_rows, sizes)
def test_every_row_is_in_exactly_one_batch(lengths, size):
    assert sorted(chain(*batches_of(lengths, size))) == list(range(len(lengths)))


@given(lengths_of_rows, sizes)
def test_only_the_last_batch_is_short(lengths, size):
    counts = [len(batch) for batch in batches_of(lengths, size)]
    assert all(count == size for count in counts[:-1])
    assert all(1 <= count <= size for count in counts)


@given(lengths_of_rows, sizes)
def test_rows_come_longest_first_and_equal_ones_in_their_order(lengths, size):
    order = list(chain(*batches_of(lengths, size)))
    assert all((-lengths[row], row) < (-lengths[after], after) for row, after in pairwise(order))


@given(lengths_of_rows, sizes)
def test_whole_batches_are_padded_no_more_than_in_row_order(lengths, size):
    lengths = lengths[: len(lengths) // size * size]
    in_row_order = [range(first, first + size) for first in range(0, len(lengths), size)]
    assert _padded(lengths, batches_of(lengths, size)) <= _padded(lengths, in_row_order)


def test_batches_of_a_known_shard():
    assert batches_of([3, 9, 9, 1, 5], 2) == [[1, 2], [4, 0], [3]]
    assert batches_of([], 4) == []


@given(lengths_of_rows, sizes)
def test_the_cost_of_a_shard_is_the_size_of_its_padded_batches(lengths, size):
    lengths = [max(1, length) for length in lengths]
    assert forward_cost(lengths, size) == _padded(lengths, batches_of(lengths, size))


def test_the_cost_of_a_known_shard():
    assert forward_cost([3, 9, 9, 1, 5], 2) == 9 * 2 + 5 * 2 + 1
    assert forward_cost([0, 0], 2) == 2
    assert forward_cost([], 2) == 0


def _padded(lengths, batches):
    return sum(len(batch) * max(lengths[row] for row in batch) for batch in batches)
