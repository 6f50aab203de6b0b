"""Tallies: those of pieces are those of the whole, and quantiles are as exact as a bin is wide."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.format.dtypes import CACHE_DTYPES, cache_dtype
from dspark_store.inspection.stats.tallies import (
    BINS,
    NO_NUMBERS,
    PER_OCTAVE,
    StateTally,
    cosines,
    count_bins,
    empty_tally,
    moments_of,
    quantile,
    tally_block,
)
from tests.stores import numbers

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)
POSITIVE = st.lists(st.floats(1e-6, 1e38), min_size=1, max_size=60)


@given(NUMBERS, NUMBERS)
def test_merged_moments_are_those_of_all_numbers(one, other):
    merged = moments_of(np.array(one)).merge(moments_of(np.array(other)))
    together = np.array(one + other)
    assert (merged.count, merged.low, merged.high) == (len(together), together.min(), together.max())
    assert merged.mean == pytest.approx(together.mean(), rel=1e-9, abs=1e-6)
    assert merged.std == pytest.approx(together.std(), rel=1e-6, abs=1e-2)


def test_no_numbers_have_no_mean():
    none = moments_of(np.array([]))
    assert none == NO_NUMBERS
    assert (none.mean, none.std) == (None, None)
    assert none.merge(moments_of(np.array([3.0]))) == moments_of(np.array([3.0]))


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


def states_of(dtype: str, tokens: int = 40, width: int = 6, seed: int = 3) -> torch.Tensor:
    return numbers(seed, (tokens, width)).to(cache_dtype(dtype).torch_dtype)


def tally_of(states: torch.Tensor, dtype: str, step: int = 7) -> StateTally:
    tally = empty_tally(states.shape[1], cache_dtype(dtype))
    for first in range(0, len(states), step):
        block = tally_block(states[first : first + step], cache_dtype(dtype), starts_sample=first == 0)
        tally = tally.merge(block.tally)
    return tally


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_sums_and_ends_are_those_of_the_values(dtype):
    states = states_of(dtype)
    values = states.double().numpy()
    tally = tally_of(states, dtype)
    np.testing.assert_allclose(tally.channels.total, values.sum(axis=0), rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(tally.channels.square, (values**2).sum(axis=0), rtol=1e-12)
    assert (tally.channels.low.tolist(), tally.channels.high.tolist()) == (
        values.min(axis=0).tolist(),
        values.max(axis=0).tolist(),
    )
    norms = np.linalg.norm(values, axis=1)
    assert tally.norms.mean == pytest.approx(norms.mean(), rel=1e-12)
    assert tally.norms.std == pytest.approx(norms.std(), rel=1e-9)
    assert tally.norm_bins.sum() == len(norms)
    assert tally.first.count == 1
    assert tally.first.mean == pytest.approx(norms[0], rel=1e-12)


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_exponents_are_those_of_the_values(dtype):
    kind = cache_dtype(dtype).torch_dtype
    states = torch.tensor([[1.0, -1.5, 0.25, 1000.0, 0.0, -0.0]], dtype=kind)
    tally = tally_of(states, dtype)
    bias = len(tally.exponents) // 2 - 1
    assert {int(at) - bias: int(tally.exponents[at]) for at in np.flatnonzero(tally.exponents)} == {
        -bias: 2,  # the zeros
        -2: 1,
        0: 2,
        9: 1,
    }
    assert tally.zeros == 2


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_subnormal_values_are_no_zeros(dtype):
    kind = cache_dtype(dtype).torch_dtype
    tally = tally_of(torch.tensor([[torch.finfo(kind).smallest_normal / 2, 0.0]], dtype=torch.float64).to(kind), dtype)
    assert (tally.zeros, int(tally.exponents[0])) == (1, 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_token_that_is_not_finite_is_counted_and_left_out(bad):
    states = states_of("bf16")
    states[:, 0] = states[:, 0].abs() + 1  # of a token left out, no zero is the least
    good = tally_of(torch.cat([states[:5], states[6:]]), "bf16", step=100)
    states[5, 2] = states[5, 3] = bad
    tally = tally_of(states, "bf16", step=100)
    assert (tally.nonfinite_tokens, int(tally.exponents[-1]), tally.norms.count) == (1, 2, 39)
    np.testing.assert_allclose(tally.channels.total, good.channels.total, rtol=1e-12, atol=1e-9)
    assert tally.channels.high.tolist() == good.channels.high.tolist()
    assert tally.channels.low.tolist() == good.channels.low.tolist()
    assert (tally.norms.low, tally.norms.high) == (good.norms.low, good.norms.high)


def test_no_tokens_are_tallied_as_nothing():
    tally = tally_of(torch.full((1, 4), float("nan"), dtype=torch.bfloat16), "bf16")
    assert (tally.norms.count, tally.first.count, tally.nonfinite_tokens) == (0, 0, 1)
    assert np.isinf(tally.channels.low).all()


def test_large_values_do_not_overflow():
    tally = tally_of(torch.full((2, 4), 3e38, dtype=torch.bfloat16), "bf16")
    assert tally.norms.mean == pytest.approx(6e38, rel=0.01)


def test_cosines_are_those_of_the_same_tokens():
    one, other = states_of("fp32", seed=3), states_of("fp32", seed=4)
    other[7] = 0
    other[8, 1] = float("inf")
    one[9] = -2 * other[9]
    blocks = [tally_block(states, cache_dtype("fp32"), starts_sample=True) for states in (one, other)]
    kept = [at for at in range(40) if at not in (7, 8)]
    expected = torch.nn.functional.cosine_similarity(one[kept].double(), other[kept].double())
    found = cosines(*blocks)
    assert found.count == 38
    assert found.low == pytest.approx(-1)
    assert found.mean == pytest.approx(float(expected.mean()), abs=1e-12)
