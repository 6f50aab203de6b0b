"""A store that is still being written opens only when asked to, and never gives what is not there."""

from pathlib import Path

import pytest

from dspark_store import open_cache, verify_store
from dspark_store.format.schema import IDS, LAST, LAYERS, MASK
from tests.stores import BuiltStore, build_store, padded, same_bits, write_states


@pytest.fixture
def growing(tmp_path: Path) -> BuiltStore:
    """Seven samples in three shards; the second shard's states are not there yet."""
    return build_store(tmp_path, without_shards={1})


def test_an_incomplete_store_is_refused(growing: BuiltStore) -> None:
    with pytest.raises(ValueError, match=r"incomplete \(its precompute was interrupted or still runs\).*--resume"):
        open_cache(growing.path)


def test_committed_shards_are_read_when_asked_for(growing: BuiltStore) -> None:
    cache, expected = open_cache(growing.path, allow_incomplete=True), padded(growing)
    assert same_bits(cache.read([0, 6])[LAST], expected.last[[0, 6]])
    assert cache.status.tolist() == [255] * 7


def test_states_that_are_not_captured_yet_are_an_error(growing: BuiltStore) -> None:
    cache = open_cache(growing.path, allow_incomplete=True)
    with pytest.raises(ValueError, match="sample 4 is in shard 1, which is not captured yet"):
        cache.read([4], columns=[LAYERS])


def test_tokens_are_read_before_their_states_are_there(growing: BuiltStore) -> None:
    batch = open_cache(growing.path, allow_incomplete=True).read([4], columns=[IDS, MASK])
    assert batch[IDS].tolist() == padded(growing).ids[[4]].tolist()


def test_a_shard_is_read_once_it_is_committed(growing: BuiltStore) -> None:
    cache = open_cache(growing.path, allow_incomplete=True)
    with pytest.raises(ValueError, match="not captured yet"):
        cache[4]
    write_states(growing.storage, growing.record, 1, growing.samples[3:6])
    assert same_bits(cache.read([4])[LAST], padded(growing).last[[4]])


def test_nothing_is_read_while_tokens_are_written(tmp_path: Path) -> None:
    build_store(tmp_path, until="tokens")
    cache = open_cache(tmp_path, allow_incomplete=True)
    assert len(cache) == 0
    with pytest.raises(ValueError, match="still in its token phase"):
        cache.read([])


def test_the_committed_shards_are_verified(growing: BuiltStore) -> None:
    seen: list[tuple[int, int]] = []
    cache = open_cache(growing.path, allow_incomplete=True)
    assert verify_store(cache, progress=lambda done, all_of_them: seen.append((done, all_of_them))) == []
    assert seen == [(1, 3), (2, 3), (3, 3)]  # of the third, the tokens


def test_no_store_is_a_manifest_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="manifest not found"):
        open_cache(tmp_path / "nothing")
