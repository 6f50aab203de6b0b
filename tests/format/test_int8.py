"""Codes of int8 states: the arithmetic on tokens made by hand, and what a calibration finds."""

from itertools import chain

import numpy as np
import pytest
import torch

from dspark_store.format.int8 import AIMS, LayerScale, calibrate, code_width, dequantise, quantise, split_codes, spread
from tests.stores import numbers

H = 64
CHANNELS = (3, 5, 8, 13, 21, 34, 55, 60)
SCALE = LayerScale(-16, CHANNELS, 0.0, 0.0)
ORDINARY = [channel for channel in range(H) if channel not in CHANNELS]


def tokens(*values):
    """Return tokens (n, H) bfloat16 of 1.0, each changed by a mapping from channel to value."""
    states = torch.ones(len(values), H, dtype=torch.bfloat16)
    for state, changed in zip(states, values, strict=True):
        for channel, value in changed.items():
            state[channel] = value
    return states


def decode(codes, channels=CHANNELS, dtype=torch.bfloat16):
    out = torch.empty(len(codes), codes.shape[1] - len(channels) - 1, dtype=dtype)
    dequantise(codes, channels, out)
    return out


def reference(state, offset, channels):
    """Return a token's counts, high bytes, exponent and whether it was widened, in Python's numbers."""
    bits = state.view(torch.int16).numpy().view(np.uint16).astype(int)
    exponents = [int(word) >> 7 & 0xFF for word in bits]
    nonzero = sum(1 for word in bits if word & 0x7FFF)
    rule = max(-127, min(126, (16 * sum(exponents) + offset * nonzero) // (16 * max(1, nonzero)) - 127))
    exponent = rule
    values = [float(value) for value in state]
    limits = [32512 if channel in channels else 127 for channel in range(len(values))]
    while any(abs(round(value * 2.0**-exponent)) > limit for value, limit in zip(values, limits, strict=True)):
        exponent += 1
    counts = [round(value * 2.0**-exponent) for value in values]
    high = [(counts[channel] + 127) // 255 for channel in channels]
    for channel, upper in zip(channels, high, strict=True):
        counts[channel] -= 255 * upper
    return counts, high, exponent, exponent > rule


@pytest.mark.parametrize("offset", [-40, -16, 0, 33])
def test_codes_are_those_of_the_rule_in_whole_numbers(offset):
    states = numbers(1, (40, H)) * torch.exp2(numbers(2, (40, 1)))
    states[5] *= 2.0**-90
    states[6, ORDINARY[3]] = 4e6  # an outlier nobody knew of
    states[7, CHANNELS[2]] = 4e6
    states[8, ORDINARY[7] :] = 0.0
    states = states.to(torch.bfloat16)
    codes, widened = quantise(states, LayerScale(offset, CHANNELS, 0.0, 0.0))
    found = split_codes(codes, H)
    expected = [reference(state, offset, CHANNELS) for state in states]
    for at, (counts, high, exponent, _) in enumerate(expected):
        assert found[0][at].tolist() == counts
        assert found[1][at].tolist() == high
        assert int(found[2][at]) == exponent
    assert widened == sum(wide for *_, wide in expected) > 0


def test_codes_do_not_depend_on_how_many_tokens_are_encoded_at_once():
    states = numbers(3, (1200, H)).to(torch.bfloat16)
    whole, _ = quantise(states, SCALE)
    parts = [quantise(states[begin : begin + 7], SCALE)[0] for begin in range(0, 1200, 7)]
    assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_states_of_another_dtype_are_rounded_to_bfloat16_first(dtype):
    states = numbers(4, (9, H)).to(dtype)
    assert torch.equal(quantise(states, SCALE)[0], quantise(states.to(torch.bfloat16), SCALE)[0])


def test_a_massive_value_in_a_high_channel_costs_the_others_nothing():
    plain, massive = decode(quantise(tokens({}, {8: 24832.0}), SCALE)[0])
    assert massive[8] == 24832.0
    assert torch.equal(massive[ORDINARY], plain[ORDINARY])


def test_a_massive_value_elsewhere_widens_the_step_of_its_token_and_is_counted():
    codes, widened = quantise(tokens({}, {ORDINARY[0]: 24832.0}), SCALE)
    assert widened == 1
    plain, massive = decode(codes)
    assert abs(float(massive[ORDINARY[0]]) - 24832.0) <= 128
    assert not massive[ORDINARY[1:]].any()
    assert torch.equal(plain, tokens({})[0])


@pytest.mark.parametrize("limit", [127, 32512])
def test_a_value_at_the_limit_of_a_count_is_kept_and_the_next_one_widens_the_step(limit):
    channel = ORDINARY[0] if limit == 127 else CHANNELS[0]
    exponent = int(split_codes(quantise(tokens({}), SCALE)[0], H)[2])
    at_most = float(torch.tensor(limit, dtype=torch.bfloat16)) * 2.0**exponent
    past = float(torch.nextafter(torch.tensor(at_most, dtype=torch.bfloat16), torch.tensor(9e9, dtype=torch.bfloat16)))
    past = max(past, (limit + 0.5) * 2.0**exponent)
    _, there = quantise(tokens({channel: at_most}), SCALE)
    _, wider = quantise(tokens({channel: past}), SCALE)
    assert (there, wider) == (0, 1)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 3.3e38])
def test_a_token_that_is_not_finite_is_fill_and_reads_as_no_number_of_its_own(value):
    codes, widened = quantise(tokens({2: value}, {}), SCALE)
    assert codes[0].tolist() == [-128] * code_width(H)
    assert widened == 0
    for dtype in (torch.bfloat16, torch.float32):
        first, second = decode(codes, dtype=dtype)
        assert torch.isneginf(first).all()
        assert torch.equal(second, torch.ones(H, dtype=dtype))


def test_zeros_stay_zero_and_do_not_count_in_the_mean_exponent():
    half = tokens(dict.fromkeys(range(H // 2), 0.0))
    codes, _ = quantise(torch.cat([half, tokens({}), 0 * half]), SCALE)
    exponents = split_codes(codes, H)[2]
    assert exponents[0] == exponents[1]
    assert torch.equal(decode(codes)[[0, 2]], torch.cat([half, 0 * half]))


@pytest.mark.parametrize("value", [2.0**-126, 2.0**-130, 2.0**-133, 1.69e38])
def test_values_at_both_ends_of_bfloat16_are_encoded_and_finite(value):
    states = torch.full((1, H), value, dtype=torch.bfloat16)
    decoded = decode(quantise(states, SCALE)[0])
    assert decoded.isfinite().all()
    assert (decoded.float() - states.float()).abs().max() <= 2.0**-127 + 0.01 * value


def test_float16_and_float32_get_the_values_that_bfloat16_gets():
    states = torch.cat([numbers(5, (30, H)), 1e-6 * numbers(6, (1, H))]).to(torch.bfloat16)
    codes, _ = quantise(states, SCALE)
    exact = decode(codes, dtype=torch.float32)
    assert torch.equal(decode(codes).float(), exact)
    assert torch.equal(decode(codes, dtype=torch.float16), exact.half())


@pytest.mark.parametrize("name", AIMS)
def test_a_calibration_meets_its_aim_and_finds_the_channels_that_overflow(name):
    states = torch.randn(3000, H, generator=torch.Generator().manual_seed(1))
    states[:, [7, 20]] *= 8
    states[::50, 33] = 3_000.0
    scale = calibrate([states[:2000], states[2000:]], H, AIMS[name])
    assert {7, 20, 33} <= set(scale.high_channels)
    assert scale.error == pytest.approx(AIMS[name], rel=0.25)  # two outliers take most of the norm
    assert scale.widened < 0.01
    assert scale == calibrate([states], H, AIMS[name])


def test_what_is_not_finite_or_zero_does_not_count_in_a_calibration():
    states = torch.randn(500, H, generator=torch.Generator().manual_seed(2))
    bad = torch.cat([tokens({1: float("nan")}, {2: float("inf")}).float(), torch.zeros(3, H)])
    assert calibrate([states, bad], H, 0.025) == calibrate([states], H, 0.025)
    assert calibrate([bad], H, 0.025).widened == calibrate([], H, 0.025).widened == 0.0


def test_rows_of_a_sample_are_spread_evenly():
    assert spread([100] * 40) == list(range(40))
    assert spread([8192] * 9) == [0]
    assert list(chain(spread([1024] * 16))) == list(range(0, 16, 2))
