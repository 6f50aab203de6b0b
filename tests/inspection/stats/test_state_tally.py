"""A layer's tally: against float64 over all its tokens, in every dtype, with values that are not finite."""

import numpy as np
import pytest
import torch

from dspark_store.format.dtypes import CACHE_DTYPES, cache_dtype
from dspark_store.inspection.stats.tallies import StateTally, cosines, empty_tally, tally_block
from tests.stores import numbers


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
    np.testing.assert_allclose(tally.channel_sum, values.sum(axis=0), rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(tally.channel_square, (values**2).sum(axis=0), rtol=1e-12)
    assert (tally.channel_low.tolist(), tally.channel_high.tolist()) == (
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
    np.testing.assert_allclose(tally.channel_sum, good.channel_sum, rtol=1e-12, atol=1e-9)
    assert tally.channel_high.tolist() == good.channel_high.tolist()
    assert tally.channel_low.tolist() == good.channel_low.tolist()
    assert (tally.norms.low, tally.norms.high) == (good.norms.low, good.norms.high)


def test_no_tokens_are_tallied_as_nothing():
    tally = tally_of(torch.full((1, 4), float("nan"), dtype=torch.bfloat16), "bf16")
    assert (tally.norms.count, tally.first.count, tally.nonfinite_tokens) == (0, 0, 1)
    assert np.isinf(tally.channel_low).all()


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
