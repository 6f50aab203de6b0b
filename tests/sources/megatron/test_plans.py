import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.sources.megatron.plans import OverLong, Plan, plan_documents
from dspark_store.sources.source import SourceError


def plan(sizes, over_long: OverLong, rows=None, seq_length: int = 4) -> Plan:
    starts = np.cumsum([0, *sizes])
    chosen = np.arange(len(sizes)) if rows is None else np.array(rows)
    return plan_documents(starts, chosen, seq_length, over_long)


def all_spans(made: Plan) -> list[tuple[int, int]]:
    return [span for sample in range(made.num_samples) for span in made.spans(sample)]


@pytest.mark.parametrize(
    ("over_long", "spans", "lengths"),
    [
        ("truncate", [(0, 2), (2, 6), (11, 15)], [2, 4, 0, 4]),
        ("drop", [(0, 2), (11, 15)], [2, 0, 0, 4]),
        ("split", [(0, 2), (2, 6), (6, 10), (10, 11), (11, 15)], [2, 9, 0, 4]),
    ],
)
def test_long_documents_are_cut_dropped_or_split(over_long, spans, lengths):
    made = plan([2, 9, 0, 4], over_long)
    assert all_spans(made) == spans
    assert made.lengths.tolist() == lengths


def test_records_are_counted_as_done_once_all_their_samples_are_before():
    made = plan([0, 2, 9, 0, 4, 0], "split")
    assert [made.records_before(sample) for sample in range(made.num_samples + 1)] == [1, 2, 2, 2, 4, 6]
    assert [made.first_sample(record) for record in range(len(made.lengths))] == [None, 0, 1, None, 4, None]


def test_documents_come_in_the_order_that_is_asked_for():
    assert all_spans(plan([2, 9, 0, 4], "truncate", rows=[3, 0])) == [(11, 15), (0, 2)]


@pytest.mark.parametrize("over_long", ["truncate", "drop", "split"])
def test_a_corpus_that_gives_no_sample_is_refused(over_long):
    with pytest.raises(SourceError, match="none of the 2 documents gives a sample"):
        plan([0, 0], over_long)


def test_a_corpus_of_which_all_is_dropped_is_refused():
    with pytest.raises(SourceError, match="longer than 4 tokens, which drops them"):
        plan([5], "drop")


@given(st.lists(st.integers(0, 11), min_size=1, max_size=9).filter(any), st.integers(1, 5))
def test_splitting_gives_every_token_once_and_in_order(sizes, seq_length):
    made = plan(sizes, "split", seq_length=seq_length)
    spans = all_spans(made)
    assert [position for start, stop in spans for position in range(start, stop)] == list(range(sum(sizes)))
    assert all(0 < stop - start <= seq_length for start, stop in spans)
    assert made.lengths.tolist() == list(sizes)
