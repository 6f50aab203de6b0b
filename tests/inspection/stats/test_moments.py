"""Moments: those of pieces are those of the whole."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.inspection.stats.tallies import Moments, moments_of

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(NUMBERS, NUMBERS)
def test_merged_moments_are_those_of_all_numbers(one, other):
    merged = moments_of(np.array(one)).merge(moments_of(np.array(other)))
    together = np.array(one + other)
    assert (merged.count, merged.low, merged.high) == (len(together), together.min(), together.max())
    assert merged.mean == pytest.approx(together.mean(), rel=1e-9, abs=1e-6)
    assert merged.std == pytest.approx(together.std(), rel=1e-6, abs=1e-2)


def test_no_numbers_have_no_mean():
    none = moments_of(np.array([]))
    assert none == Moments()
    assert (none.mean, none.std) == (None, None)
    assert none.merge(moments_of(np.array([3.0]))) == moments_of(np.array([3.0]))
