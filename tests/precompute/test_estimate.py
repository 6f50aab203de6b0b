"""What is to come: tokens, bytes, time, and whether the disk holds it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.format.codecs import CODEC_PRESETS
from dspark_store.format.dtypes import CACHE_DTYPES, cache_dtype
from dspark_store.format.schema import StoreSchema
from dspark_store.precompute.estimate import (
    COMPRESSION,
    Volume,
    distinct_states,
    estimate_lines,
    padded_bytes,
    ragged_bytes,
    ragged_rows_bytes,
    refuse_full_disk,
    stored_range,
)


def schema_of(layer_ids=(1, 2, 3), *, dtype="bf16", codec="default"):
    return StoreSchema(0, 4, 100, 32, len(layer_ids), layer_ids, cache_dtype(dtype), codec, 64)


def test_a_volume_counts_tokens_and_samples_without_supervision():
    assert Volume.of([5, 7, 3], [2, 0, 3]) == Volume(samples=3, tokens=15, supervised=5, unsupervised_samples=1)


def test_a_captured_last_layer_is_the_last_hidden_state_and_counts_once():
    assert distinct_states(schema_of((1, 2, 3)), last_layer=3) == 3
    assert distinct_states(schema_of((0, 1, 2)), last_layer=3) == 4


def test_bytes_of_a_token_follow_from_its_vectors():
    schema = schema_of((1, 2, 3))
    assert ragged_bytes(schema, 3, tokens=10) == 10 * 3 * 32 * 2
    assert ragged_rows_bytes(schema, tokens=10) == 10 * (4 * 32 * 2 + 5)
    assert padded_bytes(schema, samples=2) == 2 * 100 * (4 * 32 * 2 + 16)


@pytest.mark.parametrize("codec", CODEC_PRESETS)
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_every_codec_and_dtype_has_a_range_of_ratios(codec, dtype):
    low, high = COMPRESSION[codec, cache_dtype(dtype).itemsize]
    assert 1.0 <= low <= high


@given(st.integers(1, 10**15), st.sampled_from(sorted(COMPRESSION)))
def test_the_expected_size_is_a_range_up_to_the_raw_bytes(raw, case):
    codec, itemsize = case
    least, most = stored_range(schema_of(dtype="bf16" if itemsize == 2 else "fp32", codec=codec), raw)
    assert 0 < least <= most <= raw


def test_a_disk_that_cannot_hold_the_most_is_refused_with_both_numbers():
    schema = schema_of(codec="none")
    refuse_full_disk(1_000_000, schema, free=1_000_000)
    with pytest.raises(ValueError, match=r"no space: up to 1\.00 MB are still to be written .* 900\.00 KB are free"):
        refuse_full_disk(1_000_000, schema, free=900_000)


def test_the_lines_give_exact_bytes_and_a_time_where_the_rate_is_known():
    volume = Volume.of([100, 50], [10, 0])
    lines = list(estimate_lines(schema_of(), 3, volume, free=10**9, rate=10.0))
    assert " ".join(lines[0].split()) == "samples 2 (mean 75 tokens, 1 unsupervised)"
    assert " ".join(lines[1].split()) == "tokens 150 (10 supervised)"
    assert "28,800 bytes = 28.80 KB before compression (3 vectors a token)" in lines[2]
    assert " ".join(lines[-1].split()) == "time 15 s at 10 tokens/s"


def test_the_time_is_unknown_without_a_rate():
    lines = list(estimate_lines(schema_of(), 3, Volume.of([100], [10]), free=10**9, rate=None))
    assert "unknown: give --tokens-per-second" in lines[-1]
