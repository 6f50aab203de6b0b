"""Which rows share a forward."""

from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.format.token_shards import TokenRows
from dspark_store.target.batches import (
    PaddedTokens,
    batches_of,
    batching_fields,
    forward_cost,
    padded_batch,
    recorded_limit,
)

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


def test_batches_and_cost_of_a_known_shard():
    assert batches_of([3, 9, 9, 1, 5], 2) == [[1, 2], [4, 0], [3]]
    assert batches_of([3, 9, 9, 1, 5], PaddedTokens(10)) == [[1], [2], [4, 0], [3]]
    assert batches_of([], 4) == batches_of([], PaddedTokens(10)) == []
    assert [forward_cost(lengths, 2) for lengths in ([3, 9, 9, 1, 5], [0, 0], [])] == [9 * 2 + 5 * 2 + 1, 2, 0]


@given(lengths_of_rows, sizes)
def test_the_cost_of_a_shard_is_the_size_of_its_padded_batches(lengths, size):
    lengths = [max(1, length) for length in lengths]
    assert forward_cost(lengths, size) == _padded(lengths, batches_of(lengths, size))


@given(lengths_of_rows, st.integers(1, 120))
def test_batches_by_tokens_hold_as_many_as_fit_and_a_longer_sample_alone(lengths, most):
    batches = batches_of(lengths, PaddedTokens(most))
    sizes = [(len(batch), max(1, *(lengths[row] for row in batch))) for batch in batches]
    assert list(chain(*batches)) == list(chain(*batches_of(lengths, 1)))
    assert all(count * width <= most or count == 1 for count, width in sizes)
    assert all((count + 1) * width > most for count, width in sizes[:-1])
    assert forward_cost(lengths, PaddedTokens(most)) == sum(count * width for count, width in sizes)


@pytest.mark.parametrize("limit", [4, PaddedTokens(4)])
def test_a_manifest_tells_what_bounded_its_batches(limit):
    assert recorded_limit(batching_fields(limit)) == limit
    assert recorded_limit({}) is None


def rows_of(*ids):
    return TokenRows([np.array(row, np.int32) for row in ids], [np.ones(len(row), np.uint8) for row in ids])


def test_a_batch_is_padded_right_to_its_longest_row():
    ids, attention = padded_batch(rows_of([5, 6, 7], [8] * 9, [9]), [0, 2], 1, 300)
    assert ids.tolist() == [[5, 6, 7], [9, 1, 1]]
    assert attention.tolist() == [[1, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize("bad", [300, -1])
def test_an_id_without_an_embedding_row_is_named(bad):
    padded_batch(rows_of([0, 299]), [0], 0, 300)
    with pytest.raises(ValueError, match=f"token id {bad} has no row in the target's embedding of 300 rows"):
        padded_batch(rows_of([5, 7], [bad, 301]), [0, 1], 0, 300)


def _padded(lengths, batches):
    return sum(len(batch) * max(lengths[row] for row in batch) for batch in batches)
