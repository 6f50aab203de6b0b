"""Lengths of samples, and their histogram."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.inspection.sample_counts import length_bins, summarise_lengths


@given(st.lists(st.integers(0, 200_000), min_size=1))
def test_every_length_is_in_one_of_at_most_ten_bins(lengths):
    bins = length_bins(np.array(lengths))
    assert len(bins) <= 10
    assert [part.first for part in bins[1:]] == [part.last + 1 for part in bins[:-1]]
    assert (bins[0].first, bins[-1].last) == (0, max(lengths))
    for part in bins:
        assert part.samples == sum(part.first <= length <= part.last for length in lengths)


@pytest.mark.parametrize(("longest", "width"), [(9, 1), (10, 2), (19, 2), (20, 5), (280, 50), (2048, 500)])
def test_the_width_of_a_bin_is_a_round_number(longest, width):
    assert length_bins(np.array([longest]))[0].last == width - 1


def test_a_summary_tells_the_middle_and_who_is_at_the_limit():
    summary = summarise_lengths(np.array([4, 8, 1, 8]), limit=8)
    assert summary is not None
    assert (summary.shortest, summary.median, summary.longest, summary.mean) == (1, 4, 8, 5.25)
    assert summary.at_limit == 2


def test_without_samples_there_is_nothing_to_tell():
    assert summarise_lengths(np.array([], np.int32), limit=8) is None
