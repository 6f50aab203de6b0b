"""The logarithmic histogram: every number in its bin, and quantiles as exact as a bin is wide."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.inspection.stats.tallies import BINS, PER_OCTAVE, count_bins, quantile

POSITIVE = st.lists(st.floats(1e-6, 1e38), min_size=1, max_size=60)


@given(POSITIVE, st.sampled_from([0.0, 0.01, 0.5, 0.95, 1.0]))
def test_a_quantile_is_off_by_less_than_a_bin(values, share):
    array = np.array(values)
    found = quantile(count_bins(array), share, array.min(), array.max())
    low, high = (np.quantile(array, share, method=method) for method in ("lower", "higher"))
    width = 2 ** (1 / PER_OCTAVE) * (1 + 1e-12)
    assert low / width <= found <= high * width


def test_powers_of_two_begin_their_bins():
    below, at = count_bins(np.array([np.nextafter(8.0, 0)])), count_bins(np.array([8.0]))
    assert int(at.argmax()) == int(below.argmax()) + 1
    assert count_bins(np.array([8.0, 16.0])).nonzero()[0].tolist() == [int(at.argmax()), int(at.argmax()) + PER_OCTAVE]


def test_zero_and_what_is_beyond_the_bins_are_counted_at_the_ends():
    counts = count_bins(np.array([0.0, 1e-300, 1e300]))
    assert (int(counts[0]), int(counts[BINS - 1]), int(counts.sum())) == (2, 1, 3)
    assert quantile(counts, 0.0, 0.0, 1e300) == 0.0


def test_no_numbers_have_no_quantile():
    with pytest.raises(ValueError, match="no number was counted"):
        quantile(np.zeros(BINS, np.int64), 0.5, 0, 1)
