"""States and their stored bits are two views of one memory."""

import numpy as np
import pytest
import torch

from dspark_store.format.dtypes import (
    CACHE_DTYPES,
    CacheDtype,
    all_finite,
    bits_tensor,
    cache_dtype,
    cache_dtype_of,
    round_mantissa,
    rounded_states,
    tensor_bits,
)

EVERY_DTYPE = pytest.mark.parametrize("dtype", CACHE_DTYPES.values(), ids=CACHE_DTYPES)


@EVERY_DTYPE
def test_the_bits_of_a_tensor_are_its_own_memory(dtype):
    states = torch.zeros((3, 4), dtype=dtype.torch_dtype)
    bits = tensor_bits(states)
    bits[1, 2] = 1
    assert bits.dtype == dtype.bits
    assert states[1, 2] != 0


@EVERY_DTYPE
def test_the_tensor_of_stored_values_is_their_own_memory(dtype):
    stored = np.zeros((3, 4), dtype.stored)
    states = bits_tensor(stored, dtype.torch_dtype)
    states[1, 2] = 1.0
    assert states.dtype is dtype.torch_dtype
    assert stored.view(dtype.bits)[1, 2] != 0


@EVERY_DTYPE
def test_every_bit_pattern_survives_the_way_there_and_back(dtype):
    step = 1 if dtype.itemsize == 2 else 65_521
    patterns = np.arange(0, 2 ** (8 * dtype.itemsize), step, dtype=np.uint64).astype(dtype.bits)
    states = bits_tensor(patterns.copy().view(dtype.stored), dtype.torch_dtype)
    assert np.array_equal(tensor_bits(states), patterns)


@EVERY_DTYPE
def test_a_fill_value_is_nan(dtype):
    fill = np.array([dtype.fill_bits], dtype.bits)
    assert bool(torch.isnan(bits_tensor(fill.view(dtype.stored), dtype.torch_dtype)).all())


@EVERY_DTYPE
def test_a_dtype_is_found_by_its_names(dtype):
    assert cache_dtype(dtype.name) is dtype
    assert cache_dtype_of(dtype.torch_dtype) is dtype
    assert getattr(torch, dtype.logical) is dtype.torch_dtype


@EVERY_DTYPE
def test_stored_items_are_little_endian_and_as_wide_as_the_states(dtype):
    assert dtype.stored.itemsize == dtype.itemsize == dtype.torch_dtype.itemsize
    assert dtype.stored == dtype.stored.newbyteorder("<")


def test_bits_of_parameters_need_no_gradient():
    assert tensor_bits(torch.nn.Parameter(torch.ones(2))).tolist() == [0x3F800000, 0x3F800000]


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'fp8' is not a cache dtype; choose one of bf16, fp16, fp32"):
        cache_dtype("fp8")


def test_an_unknown_torch_dtype_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"torch\.float64 is not a cache dtype; choose one of bf16, fp16, fp32"):
        cache_dtype_of(torch.float64)


def finite_by_torch(patterns: np.ndarray, dtype: CacheDtype) -> np.ndarray:
    finite: np.ndarray = torch.isfinite(bits_tensor(patterns.view(dtype.stored), dtype.torch_dtype)).numpy()
    return finite


@EVERY_DTYPE
def test_every_bit_pattern_is_finite_or_not_as_torch_says(dtype):
    width = 8 * dtype.itemsize
    near = [around + step for around in (0, 1 << (width - 1)) for step in range(-2, 3)]
    near += [sign + dtype.infinity_bits + step for sign in (0, 1 << (width - 1)) for step in range(-2, 3)]
    spread = range(0, 1 << width, 1 if width == 16 else 1_000_003)
    patterns = np.array([pattern % (1 << width) for pattern in (*near, *spread)], np.uint64).astype(dtype.bits)
    expected = finite_by_torch(patterns.copy(), dtype)
    found = [all_finite(patterns[place : place + 1], dtype) for place in range(len(patterns))]
    assert found == expected.tolist()


@EVERY_DTYPE
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_one_value_that_is_not_finite_is_found_wherever_it_stands(dtype, bad: float):
    states = torch.linspace(-100, 100, 60).reshape(6, 10).to(dtype.torch_dtype)
    assert all_finite(tensor_bits(states), dtype)
    for place in (0, 29, 59):
        spoiled = states.clone()
        spoiled.view(-1)[place] = bad
        assert not all_finite(tensor_bits(spoiled), dtype)


@EVERY_DTYPE
def test_a_negative_nan_is_not_finite_and_the_largest_numbers_are(dtype):
    sign = 1 << (8 * dtype.itemsize - 1)
    assert not all_finite(np.array([sign | (dtype.infinity_bits + 1)], dtype.bits), dtype)
    assert not all_finite(np.array([dtype.fill_bits], dtype.bits), dtype)
    largest = torch.finfo(dtype.torch_dtype).max
    assert all_finite(tensor_bits(torch.tensor([largest, -largest, -0.0], dtype=dtype.torch_dtype)), dtype)


@EVERY_DTYPE
def test_no_values_are_all_finite(dtype):
    assert all_finite(np.empty((0, 4), dtype.bits), dtype)


@pytest.mark.parametrize("kept", range(1, 7))
def test_bf16_is_rounded_to_the_nearest_of_the_numbers_with_so_few_bits_and_to_the_even_one_between_two(kept):
    bits = np.arange(1 << 16, dtype="<u2")
    step = 1 << (7 - kept)
    rounded = bits.copy()
    round_mantissa(rounded, kept)
    values, after = (bits_tensor(each, torch.bfloat16).double().numpy() for each in (bits, rounded))
    finite = np.isfinite(values)
    assert np.array_equal(rounded[~finite], bits[~finite])
    assert np.isfinite(after[finite]).all()
    assert not (rounded[finite] % step).any()
    below = bits[finite] & ~np.uint16(step - 1)  # the two neighbours that have so few bits; above the top is no other
    top = (below & 0x7FFF) + step >= 0x7F80
    above = np.where(top, below, below + np.uint16(step))
    errors = [np.abs(bits_tensor(each, torch.bfloat16).double().numpy() - values[finite]) for each in (below, above)]
    error = np.abs(after[finite] - values[finite])
    assert np.array_equal(error, np.minimum(*errors))
    tied = (errors[0] == errors[1]) & ~top
    assert not (rounded[finite][tied] // step % 2).any()


def test_rounding_keeps_the_largest_numbers_finite():
    bits = np.array([0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7F81, 0xFFFF], "<u2")
    round_mantissa(bits, 3)
    assert bits.tolist() == [0x7F70, 0xFF70, 0x7F80, 0xFF80, 0x7F81, 0xFFFF]


def test_states_that_are_not_to_be_rounded_are_the_same_tensor():
    states = torch.randn(3, 4).bfloat16()
    assert rounded_states(states, None) is states
    assert rounded_states(states, 2) is not states
