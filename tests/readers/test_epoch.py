"""What each batch of an epoch asks for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.readers.epoch import Epoch, PackedEpoch, PaddedEpoch
from dspark_store.readers.order import BatchPlan, EndRule, epoch_order
from dspark_store.readers.packing import pack

LENGTHS = np.array([3, 0, 9, 5, 1, 7], np.int32)
ORDER = np.array([2, 0, 5, 1, 4, 3], np.int64)


def padded_epoch(last: EndRule = "short", *, start=0, stop=8, longest=False, index=True, ranks=1) -> PaddedEpoch:
    return PaddedEpoch(ORDER, LENGTHS, BatchPlan(6, 4 // ranks, ranks, last), start, stop, longest=longest, index=index)


def test_a_padded_batch_has_a_row_a_sample() -> None:
    request = padded_epoch().request(0, 0)
    assert (request.rows, request.length) == (4, 8)
    assert [(span.sample, span.start, span.stop, span.room) for span in request.spans] == [
        (2, 0, 8, 8),
        (0, 0, 3, 8),
        (5, 0, 7, 8),
        (1, 0, 0, 8),
    ]


def test_the_longest_sample_sets_the_rows_length() -> None:
    assert padded_epoch(longest=True).request(1, 0).length == 5
    assert padded_epoch(longest=True).request(0, 0).length == 8


def test_positions_past_every_sample_are_no_positions() -> None:
    request = padded_epoch(start=6, longest=True).request(1, 0)
    assert (request.rows, request.length) == (2, 0)


def test_a_batch_of_no_samples_asks_for_nothing() -> None:
    epoch = PaddedEpoch(ORDER[:1], LENGTHS, BatchPlan(1, 2, 3, "short"), 0, 8, longest=True, index=True)
    request = epoch.request(0, 0)
    assert (request.rows, request.length, request.spans) == (0, 0, ())
    assert request.fields["sample"].shape == (0,)


def test_index_fields_tell_samples_and_lengths() -> None:
    fields = padded_epoch().request(1, 0).fields
    assert {name: values.tolist() for name, values in fields.items()} == {"sample": [4, 3], "length": [1, 5]}
    assert {values.dtype for values in fields.values()} == {np.dtype(np.int64)}
    assert padded_epoch(index=False).request(1, 0).fields == {}


def test_there_is_no_batch_past_the_last() -> None:
    with pytest.raises(IndexError, match="step 2 is outside"):
        padded_epoch().request(2, 0)


def packed_epoch(budget: int, ranks: int = 1, rows: int = 2) -> PackedEpoch:
    return PackedEpoch(
        pack(ORDER, LENGTHS, budget=budget, rows_per_batch=rows, dp_size=ranks, policy="cut", last="short")
    )


def test_documents_of_a_packed_row_stand_side_by_side_and_the_last_one_is_padded() -> None:
    (request,) = [packed_epoch(10, rows=9).request(0, 0)]
    for row in range(request.rows):
        spans = [span for span in request.spans if span.batch == row]
        ends = [span.place + span.stop - span.start for span in spans]
        assert [span.place for span in spans] == [0, *ends[:-1]]
        assert [span.room for span in spans] == [*ends[:-1], 10]


def test_a_packed_batch_of_no_rows_asks_for_nothing() -> None:
    epoch = packed_epoch(30, ranks=2, rows=1)
    assert (epoch.request(0, 1).rows, epoch.request(0, 1).length) == (0, 30)
    assert epoch.samples(0, 1).tolist() == []


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_a_request_is_for_the_samples_of_its_batch(budget, ranks, batch, packs) -> None:
    order = epoch_order(6, seed=3, epoch=1)
    epoch: Epoch = PaddedEpoch(order, LENGTHS, BatchPlan(6, batch, ranks, "repeat"), 0, 8, longest=False, index=False)
    if packs:
        epoch = PackedEpoch(pack(order, LENGTHS, budget=budget, rows_per_batch=batch, dp_size=ranks, policy="cut"))
    for step in range(epoch.batches.steps):
        for rank in range(ranks):
            spans = epoch.request(step, rank).spans
            assert [span.sample for span in spans] == epoch.samples(step, rank).tolist()
