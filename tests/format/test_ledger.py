"""A ledger row is the commit of a shard: small, checked, and never replaced."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.format.arrays import pack_array, unpack_array
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.ledger import Ledger
from dspark_store.format.shard import ObjectRecord
from dspark_store.format.storage import LocalStorage

RECORDS = (ObjectRecord(10, 2**64 - 2), ObjectRecord(20, 0))


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


@pytest.fixture
def ledger(storage: LocalStorage) -> Ledger:
    return Ledger(storage, "ledger/states", 2)


def test_nothing_is_committed_at_first(ledger):
    assert ledger.committed() == []


def test_committed_shards_are_listed_in_order(ledger):
    for shard in (11, 2, 0):
        ledger.publish(shard, RECORDS)
    assert ledger.committed() == [0, 2, 11]


def test_what_is_no_row_is_not_listed(ledger, storage):
    for name in ("zarr.json", "c.1.0.1", "c.x.0.0", "c.1.0.0.bak"):
        storage.put(f"ledger/states/{name}", b"x")
    assert ledger.committed() == []


def test_a_row_comes_back(ledger):
    ledger.publish(3, RECORDS)
    assert ledger.row(3).tolist() == [[10, 2**64 - 2], [20, 0]]


def test_of_two_committers_the_second_loses_and_changes_nothing(ledger):
    ledger.publish(3, RECORDS)
    with pytest.raises(FileExistsError):
        ledger.publish(3, RECORDS[::-1])
    assert ledger.row(3)[0].tolist() == [10, 2**64 - 2]


def test_the_row_of_an_uncommitted_shard_is_not_found(ledger):
    with pytest.raises(FileNotFoundError):
        ledger.row(3)


def test_a_commit_can_be_taken_back(ledger):
    ledger.publish(3, RECORDS)
    ledger.retract(3)
    assert ledger.committed() == []
    ledger.publish(3, RECORDS)


def test_a_row_with_too_few_objects_is_refused(ledger):
    with pytest.raises(ValueError, match="a row of ledger/states has 2 objects, got 1"):
        ledger.publish(3, RECORDS[:1])
    assert ledger.committed() == []


def test_a_flip_in_any_byte_of_a_row_is_damage_that_names_it(ledger, storage):
    ledger.publish(3, RECORDS)
    key = ledger.key(3)
    whole = storage.read(key)
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << (place % 8)
        storage.path(key).write_bytes(bytes(flipped))
        with pytest.raises(DamagedStoreError, match=f"object {key} fails its checksum"):
            ledger.row(3)


def test_a_cut_row_is_damage_that_names_it(ledger, storage):
    ledger.publish(3, RECORDS)
    storage.put(ledger.key(3), storage.read(ledger.key(3))[:-5])
    with pytest.raises(DamagedStoreError, match=r"object ledger/states/c\.3\.0\.0 has 31 bytes, expected 36"):
        ledger.row(3)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20))
def test_a_packed_array_comes_back(values):
    array = np.array(values, np.uint64)
    assert np.array_equal(unpack_array(pack_array(array), "uint64", array.shape, "key"), array)


def test_a_packed_array_is_little_endian():
    big = np.array([1], ">i4")
    assert pack_array(big)[:4] == b"\x01\0\0\0"
    assert unpack_array(pack_array(big), "int32", (1,), "key").tolist() == [1]


def test_an_unpacked_array_is_read_only():
    array = unpack_array(pack_array(np.arange(3, dtype=np.int32)), "int32", (3,), "key")
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
