"""The number of each sample's source: kept with its token shard, then in the index."""

from dataclasses import replace

import numpy as np
import pytest
import xarray
import zarr

from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.metadata import read_record, write_metadata
from dspark_store.format.schema import parse_layout
from dspark_store.format.storage import LocalStorage
from dspark_store.format.token_shards import read_shard_sources, sources_key
from dspark_store.writers.publish import settle_tokens
from dspark_store.writers.tokens import write_token_shard
from tests.writers.small_store import SHARD_SIZE, random_tokens, small_record

NAMES = ("chats", "code/python", "code/rust")
ORIGINS = (0, 1, 2, 1, 0, 2)
RECORD = replace(small_record(), schema=replace(small_record().schema, sources=NAMES))


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path / "store")


def with_sources(lengths, seed, sources):
    return replace(random_tokens(lengths, seed), sources=sources)


def write_shard(storage, shard, origins):
    write_token_shard(storage, RECORD, shard, with_sources((3,) * len(origins), shard, origins), cursor=7 * (shard + 1))


def write_shards(storage):
    write_metadata(storage, RECORD)
    for shard in range(2):
        write_shard(storage, shard, ORIGINS[shard * SHARD_SIZE : (shard + 1) * SHARD_SIZE])


def test_settling_makes_the_index_of_sources_of_the_shards(storage):
    write_shards(storage)
    record = settle_tokens(storage, RECORD)
    array = zarr.open_array(storage.path("index/source"), mode="r")
    assert array.dtype == np.uint16
    assert array.fill_value == 65535
    assert np.array_equal(array[:], ORIGINS)
    assert "index/source" in record.checksums
    assert read_record(storage).schema.sources == NAMES


def test_the_sources_of_a_shard_survive_a_crash_before_the_phase_ends(storage):
    write_metadata(storage, RECORD)
    write_shard(storage, 0, ORIGINS[:SHARD_SIZE])
    again = LocalStorage(storage.root)
    assert read_shard_sources(again, read_record(again), 0, random_tokens((3,) * SHARD_SIZE, 0)).tolist() == [
        0,
        1,
        2,
        1,
    ]
    write_shard(again, 1, ORIGINS[SHARD_SIZE:])
    settle_tokens(again, read_record(again))
    assert np.array_equal(zarr.open_array(storage.path("index/source"), mode="r")[:], ORIGINS)


def test_settling_again_changes_nothing(storage):
    write_shards(storage)
    settle_tokens(storage, RECORD)
    before = {path: path.read_bytes() for path in storage.root.rglob("*") if path.is_file()}
    settle_tokens(storage, RECORD)
    assert {path: path.read_bytes() for path in storage.root.rglob("*") if path.is_file()} == before


def settle_with(storage, data):
    storage.put(sources_key(1), data)
    settle_tokens(storage, RECORD)


def test_sources_that_were_damaged_before_the_phase_ended_are_found(storage, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    write_shards(storage)
    stored = storage.read(sources_key(1))
    for place in range(len(stored)):
        with pytest.raises(DamagedStoreError, match=r"object ledger/sources/c\.1\.0"):
            settle_with(storage, stored[:place] + bytes([stored[place] ^ 1]) + stored[place + 1 :])
    settle_with(storage, stored)


def test_sources_of_another_place_store_or_tokens_are_found(storage, tmp_path):
    write_shards(storage)
    with pytest.raises(DamagedStoreError, match=r"ledger/sources/c\.1\.0 belongs to .*shard=0"):
        settle_with(storage, storage.read(sources_key(0)))
    other = LocalStorage(tmp_path / "other")
    write_token_shard(other, replace(RECORD, store_id="07e4"), 1, with_sources((3, 3), 1, (0, 2)), cursor=14)
    with pytest.raises(DamagedStoreError, match="belongs to another store"):
        settle_with(storage, other.read(sources_key(1)))
    write_token_shard(LocalStorage(tmp_path / "edited"), RECORD, 1, with_sources((3, 2), 1, (0, 2)), cursor=14)
    with pytest.raises(DamagedStoreError, match="from other tokens"):
        settle_with(storage, LocalStorage(tmp_path / "edited").read(sources_key(1)))
    storage.delete(sources_key(1))
    with pytest.raises(DamagedStoreError, match=r"object ledger/sources/c\.1\.0 is missing"):
        settle_tokens(storage, RECORD)


@pytest.mark.parametrize("origins", [(), (0,), (0, 3), (0, -1)])
def test_rows_without_a_source_of_the_store_are_refused_before_anything_is_written(storage, origins):
    with pytest.raises(ValueError, match="2 rows must have a source below 3"):
        write_token_shard(storage, RECORD, 0, with_sources((3, 3), 0, origins), cursor=2)
    assert not storage.root.exists() or not list(storage.root.rglob("c.*"))


def test_a_store_of_one_source_has_neither_array(storage):
    write_metadata(storage, small_record())
    write_token_shard(storage, small_record(), 0, with_sources((3, 3), 0, (0, 0)), cursor=2)
    settle_tokens(storage, small_record())
    assert not list(storage.root.rglob("*source*"))
    assert "sources" not in read_record(storage).schema.layout()


def test_the_layout_brings_the_names_back():
    assert parse_layout(RECORD.schema.layout()) == RECORD.schema


def test_a_single_named_source_and_equal_names_are_refused():
    with pytest.raises(ValueError, match="no or 2 to 65535 named sources, got 1"):
        replace(RECORD.schema, sources=("chats",))
    with pytest.raises(ValueError, match="different names, got a, b, a"):
        replace(RECORD.schema, sources=("a", "b", "a"))


def test_xarray_opens_the_ledger_with_its_sources(storage):
    write_shards(storage)
    settle_tokens(storage, RECORD)
    ledger = xarray.open_zarr(storage.path("ledger"), consolidated=False, zarr_format=3)
    assert ledger["sources"].dims == ("shard", "row")
    assert ledger["sources"].values.tolist() == [[0, 1, 2, 1], [0, 2, 65535, 65535]]
