"""Digests tell content apart, and nothing else."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.format.arrays import array_checksum, array_keys
from dspark_store.format.codecs import plain_chain
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.schema import ArraySpec
from dspark_store.format.storage import LocalStorage
from dspark_store.format.token_shards import sample_digest, shard_digest

TOKENS = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 1)), max_size=6)
SPEC = ArraySpec((5, 2), "uint64", 0, (2, 2), None, plain_chain(8), ("row", "word"), {})
KEYS = ["index/x/c.0.0", "index/x/c.1.0", "index/x/c.2.0"]


def digest(tokens: list[tuple[int, int]]) -> bytes:
    return sample_digest(
        np.array([token for token, _ in tokens], np.int32), np.array([mask for _, mask in tokens], "u1")
    )


def test_a_samples_digest_is_blake2b_over_ids_and_mask():
    expected = hashlib.blake2b(b"\x01\0\0\0\x02\0\0\0" + b"\x00\x01", digest_size=16).digest()
    assert digest([(1, 0), (2, 1)]) == expected


@given(TOKENS, TOKENS)
def test_equal_digests_mean_equal_tokens(one, other):
    assert (digest(one) == digest(other)) == (one == other)


def test_a_digest_does_not_depend_on_how_the_tokens_are_held():
    ids, mask = np.array([3, 9, 4, 9], np.int64), np.array([True, False, True, False])
    assert sample_digest(ids[::2], mask[::2]) == digest([(3, 1), (4, 1)])


def test_a_shards_digest_depends_on_its_samples_order():
    one, two = digest([(1, 1)]), digest([(2, 1)])
    assert shard_digest([one, two]) == hashlib.blake2b(one + two, digest_size=16).hexdigest()
    assert shard_digest([one, two]) != shard_digest([two, one])


def test_an_arrays_objects_are_named_in_order():
    assert array_keys("index/x", SPEC) == KEYS


def test_an_arrays_checksum_is_over_its_objects_in_order(tmp_path):
    storage = LocalStorage(tmp_path)
    for key, data in zip(KEYS, (b"a", b"b", b"c"), strict=True):
        storage.put(key, data)
    assert array_checksum(storage, "index/x", SPEC) == hashlib.blake2b(b"abc", digest_size=16).hexdigest()


def test_a_missing_object_of_an_array_is_named(tmp_path):
    storage = LocalStorage(tmp_path)
    storage.put(KEYS[0], b"a")
    with pytest.raises(DamagedStoreError, match=rf"object {KEYS[1]} is missing from"):
        array_checksum(storage, "index/x", SPEC)
