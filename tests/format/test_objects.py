"""An object is opened only as what it ought to be."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dspark_store.format.codecs import plain_chain
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.grid import ShardGrid
from dspark_store.format.objects import Expected, StoredObject, open_object
from dspark_store.format.shard import ObjectLabel, ObjectRecord, Place, ShardWriter
from dspark_store.format.storage import LocalStorage

KEY = "target_hidden_states/c.0.0.1"
CHAIN = plain_chain(2)
CHUNK = np.arange(6, dtype="<u2")
PLACE = Place("target_hidden_states", 1, 5, 0)
TWIN = Place("target_last_hidden_states", 0, None, 0)
EXPECTED = Expected("a-store", PLACE, tokens="tokens")


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


@pytest.fixture
def record(storage: LocalStorage) -> ObjectRecord:
    writer = ShardWriter(storage.create(KEY), 2)
    writer.append(0, CHAIN.encode(CHUNK))
    return writer.finish(ObjectLabel("a-store", (PLACE, TWIN), 1, "tokens"))


def opened(storage: LocalStorage, expected: Expected = EXPECTED) -> StoredObject:
    return open_object(storage, KEY, ShardGrid(2, 2, 1, 1), expected)


def test_the_expected_object_opens(storage, record):
    out = np.zeros_like(CHUNK)
    opened(storage, replace(EXPECTED, record=record)).decode(0, CHAIN, out)
    assert np.array_equal(out, CHUNK)


def test_a_shared_object_opens_in_both_its_places(storage, record):
    opened(storage, replace(EXPECTED, place=TWIN, record=record))


def test_a_missing_object_is_named(storage):
    with pytest.raises(DamagedStoreError, match=rf"object {KEY} is missing from {re.escape(str(storage))}"):
        opened(storage)


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (replace(EXPECTED, store_id="another"), r"belongs to another store \(a-store, expected another\)"),
        (replace(EXPECTED, place=replace(PLACE, slot=0)), "belongs to .*, not to "),
        (replace(EXPECTED, place=replace(PLACE, shard=3)), "belongs to .*, not to "),
        (replace(EXPECTED, tokens="others"), "was computed from other tokens"),
        (replace(EXPECTED, record=ObjectRecord(1, 2)), "is not the one in the ledger"),
    ],
)
def test_an_unexpected_object_is_named_with_the_reason(storage, record, expected, message: str):
    with pytest.raises(DamagedStoreError, match=f"object {KEY} {message}"):
        opened(storage, expected)


def test_an_absent_chunk_is_named(storage, record):
    with pytest.raises(DamagedStoreError, match=f"object {KEY} lacks the chunk in slot 1"):
        opened(storage).decode(1, CHAIN, np.zeros_like(CHUNK))


def test_an_altered_chunk_is_named(storage, record):
    stored = bytearray(storage.read(KEY))
    stored[3] ^= 4
    storage.put(KEY, bytes(stored))
    with pytest.raises(DamagedStoreError, match=f"object {KEY}, slot 0: chunk checksum"):
        opened(storage).decode(0, CHAIN, np.zeros_like(CHUNK))


def test_an_object_cut_while_it_is_open_is_named(storage, record):
    stored = opened(storage)
    with storage.path(KEY).open("r+b") as file:
        file.truncate(5)
    with pytest.raises(DamagedStoreError, match=f"object {KEY}, slot 0: chunk has 5 of 16 bytes"):
        stored.decode(0, CHAIN, np.zeros_like(CHUNK))
