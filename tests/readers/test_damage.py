"""Damage is an error that says where it is, and reading elsewhere goes on."""

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dspark_store import DamagedStoreError, open_cache, verify_store
from dspark_store.format.arrays import pack_array
from dspark_store.format.grid import ShardGrid
from dspark_store.format.metadata import write_metadata
from dspark_store.format.objects import Expected, StoredObject, open_object
from dspark_store.format.schema import IDS, LAST, object_key
from dspark_store.format.shard import Place, read_tail
from dspark_store.format.storage import LocalStorage
from dspark_store.readers.ranges import ObjectName, ObjectPool
from tests.stores import BuiltStore, build_store, flip, padded, same_bits

LAYER_OBJECT = "target_hidden_states/c.1.0.1"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> BuiltStore:
    return build_store(tmp_path_factory.mktemp("original"), codec="none")


@pytest.fixture
def path(original: BuiltStore, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(original.path, tmp_path / "store"))


def chunk_place(path: Path, key: str, slot: int) -> int:
    """Return where a slot's chunk starts in its object; three rows of three chunks each."""
    reader = LocalStorage(path).open(key)
    place = int(read_tail(reader, ShardGrid(3, 3, 3, 1)).bounds[slot // 3, slot % 3])
    reader.close()
    return place


def test_a_missing_object_names_column_layer_sample_shard_and_object(path: Path) -> None:
    (path / LAYER_OBJECT).unlink()
    with pytest.raises(DamagedStoreError) as caught:
        open_cache(path)[4]
    expected = f"target_hidden_states, layer -1, sample 4 (shard 1): object {LAYER_OBJECT} is missing from"
    assert str(caught.value).startswith(expected)


def test_a_flipped_chunk_names_its_sample_and_its_slot(path: Path) -> None:
    flip(path / LAYER_OBJECT, chunk_place(path, LAYER_OBJECT, 3))
    with pytest.raises(DamagedStoreError) as caught:
        open_cache(path)[4]
    expected = f"target_hidden_states, layer -1, sample 4 (shard 1): object {LAYER_OBJECT}, slot 3: chunk checksum"
    assert str(caught.value).startswith(expected)


def test_damage_of_one_sample_leaves_the_others_readable(path: Path, original: BuiltStore) -> None:
    flip(path / LAYER_OBJECT, chunk_place(path, LAYER_OBJECT, 3))
    cache = open_cache(path)
    for row in (0, 1, 2, 3, 5, 6):
        assert same_bits(cache.read([row])[LAST], padded(original).last[[row]])


def test_only_the_asked_layers_are_read(path: Path) -> None:
    (path / LAYER_OBJECT).unlink()
    open_cache(path).read([4], layers=[2, 5])


def test_only_the_asked_positions_are_read(path: Path) -> None:
    flip(path / LAYER_OBJECT, chunk_place(path, LAYER_OBJECT, 7))
    cache = open_cache(path)
    cache.read([5], positions=slice(0, 8))
    with pytest.raises(DamagedStoreError, match="slot 7"):
        cache.read([5], positions=slice(8, 9))


def test_checksums_can_be_left_out(path: Path) -> None:
    flip(path / LAYER_OBJECT, chunk_place(path, LAYER_OBJECT, 3))
    open_cache(path, verify=False).read([4])


def test_damaged_tokens_name_their_column(path: Path) -> None:
    flip(path / "input_ids/c.0.0", 3)
    with pytest.raises(DamagedStoreError, match=r"^input_ids, sample 0 \(shard 0\): object input_ids/c\.0\.0, slot 0"):
        open_cache(path).read([0], columns=[IDS])


@pytest.mark.parametrize("name", ["length", "supervised", "digest", "status"])
def test_a_damaged_index_is_named(path: Path, name: str) -> None:
    (key,) = (path / "index" / name).glob("c.*")
    flip(key, 0)
    cache = open_cache(path)
    with pytest.raises(DamagedStoreError, match=f"index array index/{name} of .* is not the one that was sealed"):
        _ = cache.index.digest if name == "digest" else getattr(cache, {"length": "lengths"}.get(name, name))


@pytest.mark.parametrize(("name", "number"), [("length", -1), ("length", 21), ("supervised", -1), ("supervised", 10)])
def test_an_index_of_numbers_that_no_sample_has_is_named(path: Path, name: str, number: int) -> None:
    cache = open_cache(path)
    values = np.array(getattr(cache.index, name))
    values[4] = number
    (path / "index" / name / "c.0").write_bytes(stored := pack_array(values))
    checksums = {**cache.record.checksums, f"index/{name}": hashlib.blake2b(stored, digest_size=16).hexdigest()}
    write_metadata(cache.storage, replace(cache.record, checksums=checksums))
    with pytest.raises(DamagedStoreError, match=f"index array index/{name} of .* holds {number} for sample 4, which"):
        getattr(open_cache(path).index, name)


def test_a_missing_index_is_named(path: Path) -> None:
    (path / "index/length/c.0").unlink()
    with pytest.raises(DamagedStoreError, match=r"object index/length/c\.0 is missing"):
        _ = open_cache(path).lengths


def test_a_damaged_table_of_objects_stops_every_read(path: Path) -> None:
    flip(path / "index/objects/c.0.0.0", 5)
    with pytest.raises(DamagedStoreError, match="index array index/objects"):
        open_cache(path)[0]


def test_swapped_layers_are_found(path: Path) -> None:
    one, other = path / "target_hidden_states/c.0.0.0", path / "target_hidden_states/c.0.0.1"
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    with pytest.raises(DamagedStoreError, match=r"belongs to .*slot=(\d).*, not to .*slot=(?!\1)\d"):
        open_cache(path)[0]


def test_another_stores_object_is_found(path: Path, tmp_path: Path) -> None:
    other = build_store(tmp_path / "other", codec="none", fields={"store_id": "f" * 32})
    shutil.copy(other.path / LAYER_OBJECT, path / LAYER_OBJECT)
    with pytest.raises(DamagedStoreError, match="belongs to another store"):
        open_cache(path)[4]


class TestVerifyStore:
    def test_a_good_store_has_no_problems(self, path: Path) -> None:
        assert verify_store(open_cache(path)) == []

    @pytest.mark.parametrize("codec", ["default", "fast", "dense"])
    def test_a_good_store_of_another_codec_has_none_either(self, codec: str, tmp_path: Path) -> None:
        build_store(tmp_path, codec=codec, tied=True, spoiled=1)
        assert verify_store(open_cache(tmp_path)) == []

    def test_progress_is_told_shard_by_shard(self, path: Path) -> None:
        seen: list[tuple[int, int]] = []
        verify_store(open_cache(path), progress=lambda done, shards: seen.append((done, shards)))
        assert seen == [(1, 3), (2, 3), (3, 3)]

    def test_a_flipped_chunk_is_a_problem_of_its_sample(self, path: Path) -> None:
        flip(path / LAYER_OBJECT, chunk_place(path, LAYER_OBJECT, 3))
        (problem,) = verify_store(open_cache(path))
        assert problem.samples == (4,)
        assert problem.key == LAYER_OBJECT

    def test_a_missing_object_is_a_problem_of_its_shard(self, path: Path) -> None:
        (path / LAYER_OBJECT).unlink()
        problems = verify_store(open_cache(path))
        assert {sample for problem in problems for sample in problem.samples} == {3, 4, 5}

    def test_damage_is_found_though_checksums_were_left_out(self, path: Path) -> None:
        flip(path / LAYER_OBJECT, chunk_place(path, LAYER_OBJECT, 3))
        assert verify_store(open_cache(path, verify=False)) != []

    def test_an_object_lost_while_the_store_is_open_is_found(self, path: Path) -> None:
        cache = open_cache(path)
        cache.read(range(7))
        (path / "target_last_hidden_states/c.2.0.0").unlink()
        assert verify_store(cache) != []

    def test_metadata_lost_while_the_store_is_open_is_found(self, path: Path) -> None:
        cache = open_cache(path)
        (path / "index/zarr.json").unlink()
        (problem,) = verify_store(cache)
        assert problem.key == "index/zarr.json"

    def test_a_flip_in_any_object_is_a_problem(self, path: Path) -> None:
        clean = {file: file.read_bytes() for file in path.rglob("*c.*") if file.is_file()}
        for number, (file, data) in enumerate(sorted(clean.items())):
            flip(file, number * 7919 % len(data), number % 8)
            assert verify_store(open_cache(path)) != [], file
            file.write_bytes(data)
        assert verify_store(open_cache(path)) == []


class TestObjectPool:
    def test_an_object_is_opened_once(self, path: Path) -> None:
        pool = ObjectPool()
        assert pool.get((LAST, 0, 0), opening(path)) is pool.get((LAST, 0, 0), opening(path))

    def test_the_least_recently_used_object_is_let_go(self, path: Path) -> None:
        pool = ObjectPool(limit=2)
        opened = [pool.get((LAST, shard, 0), opening(path)) for shard in (0, 1)]
        assert pool.get((LAST, 0, 0), opening(path)) is opened[0]
        pool.get((LAST, 2, 0), opening(path))
        assert pool.get((LAST, 0, 0), opening(path)) is opened[0]
        assert pool.get((LAST, 1, 0), opening(path)) is not opened[1]

    def test_tails_take_a_bounded_number_of_bytes(self, path: Path) -> None:
        each = opening(path)((LAST, 0, 0)).tail.nbytes
        pool = ObjectPool(tail_bytes=2 * each)
        opened = [pool.get((LAST, shard, 0), opening(path)) for shard in (0, 1, 2)]
        kept = [pool.get((LAST, shard, 0), opening(path)) is opened[shard] for shard in (2, 1, 0)]
        assert kept == [True, True, False]
        small = ObjectPool(tail_bytes=1)
        assert small.get((LAST, 0, 0), opening(path)) is small.get((LAST, 0, 0), opening(path))

    def test_an_object_that_was_let_go_is_still_readable(self, path: Path) -> None:
        pool = ObjectPool(limit=1)
        held = pool.get((LAST, 0, 0), opening(path))
        pool.get((LAST, 1, 0), opening(path))
        pool.close()
        assert len(held.reader.read(0, 10)) == 10


def opening(path: Path) -> Callable[[ObjectName], StoredObject]:
    """Return what opens an object of the last hidden states."""
    record, storage = open_cache(path).record, LocalStorage(path)

    def opened(name: ObjectName) -> StoredObject:
        column, shard, slot = name
        place = Place(column, slot, None, shard)
        key = object_key(column, shard, slot)
        return open_object(storage, key, record.schema.states, Expected(record.store_id, place))

    return opened
