"""What is to come, in bytes, and whether the disk holds it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.format.codecs import CODEC_PRESETS
from dspark_store.format.dtypes import CACHE_DTYPES, cache_dtype
from dspark_store.format.schema import StoreSchema
from dspark_store.format.sizes import Volume, ragged_bytes
from dspark_store.precompute.estimate import refuse_full_disk, stored_range


def schema_of(layer_ids=(1, 2, 3), *, dtype="bf16", codec="default"):
    return StoreSchema(0, 4, 100, 32, len(layer_ids), layer_ids, cache_dtype(dtype), codec, 64)


@given(st.lists(st.integers(1, 100), min_size=1), st.sampled_from(CODEC_PRESETS), st.sampled_from(sorted(CACHE_DTYPES)))
def test_the_expected_size_is_a_range_up_to_the_raw_bytes(lengths, codec, dtype):
    schema = schema_of(dtype=dtype, codec=codec)
    least, most = stored_range(schema, 3, Volume.of(schema, lengths, lengths))
    assert 0 < least <= most
    assert codec == "none" or most <= ragged_bytes(schema, 3, sum(lengths))


def test_without_compression_whole_chunks_are_stored():
    schema = schema_of(codec="none")
    whole = ragged_bytes(schema, 3, tokens=3 * 64)
    assert stored_range(schema, 3, Volume.of(schema, [1, 65], [1, 1])) == (whole, whole)


def test_a_disk_that_cannot_hold_the_most_is_refused_with_both_numbers():
    schema = schema_of(codec="none")
    volume = Volume.of(schema, [64] * 100, [64] * 100)
    refuse_full_disk(schema, 3, volume, free=1_228_800)
    with pytest.raises(ValueError, match=r"up to 1\.23 MB of states .* written, 900\.00 KB are free"):
        refuse_full_disk(schema, 3, volume, free=900_000)
    with pytest.raises(ValueError, match=r"of states .* and 57\.00 MB of embedding and head .*, 20\.00 MB are free"):
        refuse_full_disk(schema, 3, volume, free=20_000_000, tables=57_000_000)
