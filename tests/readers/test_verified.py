"""A chunk is checked the first time that this process reads it, and again when its object has changed."""

import inspect
import os
import shutil
import threading
from collections.abc import Hashable
from pathlib import Path

import pytest
import torch

from dspark_store import Cache, CacheLoader, DamagedStoreError, open_cache, verify_store
from dspark_store.format.files import LocalObject
from dspark_store.format.schema import LAST, LAYERS
from dspark_store.format.storage import LocalStorage
from dspark_store.readers.fetch import VerifiedChunks
from tests.stores import BuiltStore, build_store, flip, padded

OBJECT = f"{LAST}/c.0.0.0"
LAYER_OBJECT = f"{LAYERS}/c.0.0.0"


@pytest.fixture(params=["none", "default"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BuiltStore:
    return build_store(tmp_path / "store", codec=request.param, weights=False)


def flip_unseen(path: Path) -> None:
    """Flip a bit of the first chunk in place and leave no trace of it, as a bad disk does."""
    found = path.stat()
    flip(path, 8)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def last_states(cache: Cache) -> torch.Tensor:
    """The last states of a sample, as bits."""
    return cache.read([0], columns=[LAST])[LAST].view(torch.int16)


def test_first_is_the_default_of_a_cache() -> None:
    for opening in (open_cache, Cache):
        assert inspect.signature(opening).parameters["verify"].default == "first"


@pytest.mark.parametrize("verify", ["first", True])
def test_a_flip_before_the_first_read_is_found(store: BuiltStore, verify) -> None:
    flip_unseen(store.path / OBJECT)
    for _ in range(2):  # what failed once was not checked
        with pytest.raises(DamagedStoreError, match=r"sample 0 \(shard 0\).*slot 0"):
            last_states(open_cache(store.path, verify=verify))


def test_a_flip_after_the_first_read_is_found_only_by_checks_at_every_read(tmp_path: Path) -> None:
    store = build_store(tmp_path, codec="none", weights=False)
    before = last_states(open_cache(tmp_path))
    flip_unseen(tmp_path / OBJECT)
    assert not torch.equal(last_states(open_cache(tmp_path)), before)
    with pytest.raises(DamagedStoreError):
        last_states(open_cache(store.path, verify=True))


def test_a_flipped_row_that_is_copied_is_found(tmp_path: Path) -> None:
    store = build_store(tmp_path, codec="none", weights=False)
    flip_unseen(store.path / LAYER_OBJECT)
    with pytest.raises(DamagedStoreError, match="slot 0"):
        open_cache(tmp_path).read([0], columns=[LAYERS], layout="flat")


def test_what_no_read_has_checked_is_checked_whatever_else_was(store: BuiltStore) -> None:
    cache = open_cache(store.path)
    cache.read([1, 2], columns=[LAST])
    cache.read([0], columns=[LAST], positions=slice(8, 20))
    flip_unseen(store.path / OBJECT)
    with pytest.raises(DamagedStoreError, match="slot 0"):
        cache.read([0], columns=[LAST])


@pytest.mark.parametrize("opened", [True, False])
def test_an_object_that_was_changed_in_place_is_checked_anew(store: BuiltStore, opened: bool) -> None:
    cache = open_cache(store.path)
    last_states(cache)
    flip(store.path / OBJECT, 8)
    os.utime(store.path / OBJECT, ns=(0, 1))  # another time, however coarse the clock of the file system
    with pytest.raises(DamagedStoreError):
        last_states(cache if opened else open_cache(store.path))


def test_an_object_that_was_replaced_is_checked_anew(store: BuiltStore) -> None:
    last_states(open_cache(store.path))
    path, copy = store.path / OBJECT, store.path / "copy"
    shutil.copy2(path, copy)
    flip_unseen(copy)
    copy.replace(path)
    with pytest.raises(DamagedStoreError):
        last_states(open_cache(store.path))


def test_a_chunk_is_checked_once_for_all_caches_of_a_process(store: BuiltStore, monkeypatch) -> None:
    checks: list[bool] = []
    holds = VerifiedChunks.holds

    def noted(known: VerifiedChunks, version: Hashable, first: int, count: int) -> bool:
        checks.append(holds(known, version, first, count))
        return checks[-1]

    monkeypatch.setattr(VerifiedChunks, "holds", noted)
    CacheLoader(open_cache(store.path), 1, min_supervised=0, dp_rank=0, dp_size=1).cache.read([0])
    assert not any(checks)
    checks.clear()
    open_cache(store.path).read([0])
    assert checks
    assert all(checks)


def test_what_may_change_unseen_is_checked_at_every_read(store: BuiltStore, monkeypatch) -> None:
    monkeypatch.setattr(LocalObject, "version", lambda self: None)
    cache = open_cache(store.path)
    last_states(cache)
    flip_unseen(store.path / OBJECT)
    with pytest.raises(DamagedStoreError):
        last_states(cache)


def test_another_store_at_the_same_keys_is_another(store: BuiltStore, tmp_path: Path) -> None:
    open_cache(store.path).read(range(7))
    other = build_store(tmp_path / "other", codec="none", weights=False, fields={"store_id": "0" * 32})
    flip_unseen(other.path / OBJECT)
    with pytest.raises(DamagedStoreError):
        last_states(open_cache(other.path))


def test_verification_reads_all_that_was_checked_before(store: BuiltStore) -> None:
    cache = open_cache(store.path)
    cache.read(range(7))
    flip_unseen(store.path / OBJECT)
    assert OBJECT in {problem.key for problem in verify_store(cache)}


def test_never_checks_find_nothing(tmp_path: Path) -> None:
    store = build_store(tmp_path, codec="none", weights=False)
    flip_unseen(tmp_path / OBJECT)
    assert not torch.equal(last_states(open_cache(tmp_path, verify=False)), padded(store).last[:1].view(torch.int16))


def test_threads_note_what_they_checked_without_losing_any() -> None:
    known = VerifiedChunks()

    def check(first: int) -> None:
        for slot in range(first, 4000, 8):
            known.add("v", slot, 1)

    threads = [threading.Thread(target=check, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert known.holds("v", 0, 4000)
    assert not known.holds("v", 0, 4001)
    known.add("w", 5, 2)
    assert not known.holds("v", 0, 1)
    assert (known.holds("w", 5, 2), known.holds("w", 4, 2)) == (True, False)


@pytest.mark.parametrize("verify", ["always", "", None, 1, 0])
def test_another_kind_of_check_is_refused(store: BuiltStore, verify) -> None:
    with pytest.raises(ValueError, match='choose from True, "first", False'):
        Cache(LocalStorage(store.path), verify=verify)


@pytest.mark.parametrize("positions", [None, slice(0, 8), slice(3, 17), slice(8, 20), slice(19, 20), slice(9, 9)])
@pytest.mark.parametrize("layout", ["flat", "stacked"])
def test_batches_are_the_same_however_often_they_are_checked(store: BuiltStore, layout, positions) -> None:
    rows, expected = [6, 0, 3, 3, 1], None
    for verify in (True, "first", False):
        fresh = open_cache(store.path).read(rows, layout=layout, positions=positions)
        dirty = {name: torch.full_like(values, 7) for name, values in fresh.items()}
        batch = open_cache(store.path, verify=verify).read(rows, layout=layout, positions=positions, out=dirty)
        expected = expected or fresh
        assert all(
            torch.equal(batch[name].view(torch.uint8), values.view(torch.uint8)) for name, values in expected.items()
        )
