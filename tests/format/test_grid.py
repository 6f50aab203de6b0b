"""Every position of every sample lies in exactly one chunk of exactly one shard."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.format.grid import ShardGrid, default_chunk_tokens

GRIDS = st.builds(ShardGrid, st.integers(0, 23), st.integers(1, 9), st.integers(1, 40), st.integers(1, 48))
KIB = 1024


@given(GRIDS)
def test_every_position_lies_in_exactly_one_chunk(grid):
    seen: Counter[tuple[int, int]] = Counter()
    for shard in range(grid.num_shards):
        for slot in range(grid.slots):
            row, chunk = divmod(slot, grid.chunks_per_row)
            if row < len(grid.rows(shard)):
                first = chunk * grid.chunk_tokens
                stop = min(first + grid.chunk_tokens, grid.seq_length)
                seen.update((grid.rows(shard)[row], position) for position in range(first, stop))
    everything = {(sample, position) for sample in range(grid.num_samples) for position in range(grid.seq_length)}
    assert seen.keys() == everything
    assert set(seen.values()) <= {1}


@given(GRIDS)
def test_shards_are_a_partition_of_the_samples(grid):
    assert [sample for shard in range(grid.num_shards) for sample in grid.rows(shard)] == list(range(grid.num_samples))
    assert all(len(grid.rows(shard)) == grid.shard_size for shard in range(grid.num_shards - 1))


@given(GRIDS)
def test_a_sample_is_located_where_its_shard_holds_it(grid):
    for sample in range(grid.num_samples):
        shard, row = grid.locate(sample)
        assert grid.rows(shard)[row] == sample


@given(GRIDS, st.integers(0, 60))
def test_stored_chunks_cover_a_samples_length_and_not_one_chunk_more(grid, length):
    covered = grid.chunks_of(length) * grid.chunk_tokens
    kept = min(length, grid.seq_length)
    assert kept <= covered < kept + grid.chunk_tokens


@given(GRIDS)
def test_a_padded_row_is_whole_chunks(grid):
    assert grid.padded_length % grid.chunk_tokens == 0
    assert 0 <= grid.padded_length - grid.seq_length < grid.chunk_tokens
    assert grid.slots * grid.chunk_tokens == grid.shard_size * grid.padded_length


@pytest.mark.parametrize("sample", [-1, 7, 8])
def test_a_sample_outside_the_store_is_an_index_error(sample):
    with pytest.raises(IndexError, match=f"sample {sample} is outside the store's 7 samples"):
        ShardGrid(7, 3, 20, 8).locate(sample)


@pytest.mark.parametrize("shard", [-1, 3])
def test_a_shard_outside_the_store_is_an_index_error(shard):
    with pytest.raises(IndexError, match=f"shard {shard} is outside the store's 3 shards"):
        ShardGrid(7, 3, 20, 8).rows(shard)


@pytest.mark.parametrize("field", ["shard_size", "seq_length", "chunk_tokens"])
def test_a_grid_without_extent_is_refused(field):
    sizes = {"num_samples": 1, "shard_size": 1, "seq_length": 1, "chunk_tokens": 1, field: 0}
    with pytest.raises(ValueError, match=f"{field} must be >= 1, got 0"):
        ShardGrid(**sizes)


def test_a_negative_number_of_samples_is_refused():
    with pytest.raises(ValueError, match="num_samples must be >= 0, got -1"):
        ShardGrid(-1, 1, 1, 1)


@pytest.mark.parametrize(
    ("hidden_size", "seq_length", "tokens"), [(2560, 4096, 256), (4096, 4096, 64), (576, 512, 512), (2048, 4096, 128)]
)
def test_the_chunk_of_a_compressed_preset_is_the_designs(hidden_size, seq_length, tokens):
    assert default_chunk_tokens(hidden_size, 2, seq_length, compressed=True) == tokens


@pytest.mark.parametrize(("hidden_size", "tokens"), [(576, 128), (2048, 64), (4096, 64), (1024, 128)])
def test_the_chunk_of_the_plain_preset_is_small(hidden_size, tokens):
    assert default_chunk_tokens(hidden_size, 2, 4096, compressed=False) == tokens


@given(st.integers(1, 20_000), st.sampled_from([2, 4]), st.integers(1, 100_000), st.booleans())
def test_a_default_chunk_is_whole_steps_or_the_whole_row(width, itemsize, seq, compressed):
    tokens = default_chunk_tokens(width, itemsize, seq, compressed=compressed)
    assert 1 <= tokens <= seq
    assert tokens % 64 == 0 or tokens == seq
    assert compressed or tokens in (64, 128, seq)


@given(st.integers(1, 20_000), st.sampled_from([2, 4]))
def test_a_compressed_chunk_fills_whole_blocks_where_it_can(width, itemsize):
    token_bytes = width * itemsize
    sizes = [tokens * token_bytes for tokens in range(64, 1 + 2048 * KIB // token_bytes, 64)]
    good = [size for size in sizes if size >= 512 * KIB and size % (256 * KIB) == 0]
    chosen = default_chunk_tokens(width, itemsize, 10**7, compressed=True) * token_bytes
    if good:
        assert chosen == good[0]
    else:
        assert all(abs(chosen - 1280 * KIB) <= abs(size - 1280 * KIB) for size in sizes)
