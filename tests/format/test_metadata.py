"""The metadata tree is written behind one commit and read under one seal."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.manifest import ATTRIBUTE, parse_record
from dspark_store.format.metadata import (
    COPY_KEY,
    ROOT_KEY,
    has_store,
    node_key,
    read_metadata,
    read_record,
    record_nodes,
    write_metadata,
)
from dspark_store.format.storage import LocalStorage
from tests.stores import BuiltStore, build_store


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuiltStore:
    return build_store(tmp_path_factory.mktemp("store"), lengths=(3, 20))


@pytest.fixture
def storage(built: BuiltStore, tmp_path: Path) -> LocalStorage:
    """A copy of the metadata of a complete store."""
    storage = LocalStorage(tmp_path)
    write_metadata(storage, built.record)
    return storage


def edit(storage: LocalStorage, key: str, change: Callable[[Any], None]) -> None:
    document = json.loads(storage.read(key))
    change(document)
    storage.put(key, json.dumps(document).encode())


def test_what_was_written_is_read(storage, built):
    metadata = read_metadata(storage)
    assert metadata.record == read_record(storage) == built.record
    assert metadata.nodes == record_nodes(built.record)


def test_groups_come_before_their_arrays(built):
    paths = list(record_nodes(built.record))
    for position, path in enumerate(paths):
        parent = path.rpartition("/")[0]
        assert not parent or parent in paths[:position]


def test_a_growing_store_has_the_arrays_of_its_phase(tmp_path):
    tokens = record_nodes(build_store(tmp_path / "tokens", until="tokens").record)
    states = record_nodes(build_store(tmp_path / "states", until="states").record)
    assert "index/length" not in tokens
    assert "index/length" in states
    assert "index/objects" not in states


def test_writing_the_same_again_changes_nothing_but_the_root(storage, built):
    inodes = {path: path.stat().st_ino for path in storage.root.rglob("zarr.json")}
    write_metadata(storage, built.record)
    changed = [path for path, inode in inodes.items() if path.stat().st_ino != inode]
    assert changed == [storage.path(ROOT_KEY)]


def test_no_store_is_a_manifest_not_found(tmp_path):
    storage = LocalStorage(tmp_path / "nothing")
    assert not has_store(storage)
    for read in (read_metadata, read_record):
        with pytest.raises(
            FileNotFoundError, match=r"manifest not found: there is no directory .*nothing \(no zarr.json\)"
        ):
            read(storage)
        with pytest.raises(FileNotFoundError, match=r"not found: .* holds no dspark-store \(no zarr.json\)"):
            read(LocalStorage(tmp_path))


def test_a_foreign_group_is_a_manifest_not_found(tmp_path):
    storage = LocalStorage(tmp_path)
    storage.put(ROOT_KEY, b'{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    with pytest.raises(ValueError, match=r"manifest not found: the Zarr group at .* is no dspark-store"):
        read_metadata(storage)


def test_another_format_version_is_named(storage):
    edit(storage, ROOT_KEY, lambda root: root["attributes"][ATTRIBUTE].update(format_version=999))
    with pytest.raises(ValueError, match="format_version 999"):
        read_metadata(storage)


def test_a_missing_node_is_named(storage):
    storage.delete("index/length/zarr.json")
    with pytest.raises(DamagedStoreError, match=r"object index/length/zarr\.json is missing"):
        read_metadata(storage)


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff\xfe", b""])
def test_a_node_that_is_no_json_object_is_named(storage, text):
    storage.put("index/length/zarr.json", text)
    with pytest.raises(DamagedStoreError, match=r"object index/length/zarr\.json of .* is not"):
        read_metadata(storage)


def test_a_changed_attribute_breaks_the_seal(storage):
    edit(storage, ROOT_KEY, lambda root: root["attributes"][ATTRIBUTE]["manifest"].update(pad_token_id=6))
    with pytest.raises(DamagedStoreError, match=r"the seal of the store at .* does not hold"):
        read_metadata(storage)


def test_a_change_in_any_node_breaks_the_seal(storage, built):
    for path in record_nodes(built.record):
        before = storage.read(node_key(path))
        edit(storage, node_key(path), lambda node: node["attributes"].update(note="new"))
        with pytest.raises(DamagedStoreError, match="seal"):
            read_metadata(storage)
        storage.put(node_key(path), before)
    read_metadata(storage)


def test_another_layout_of_the_same_json_is_the_same_store(storage, built):
    for path in record_nodes(built.record):
        edit(storage, node_key(path), lambda node: None)
    assert read_metadata(storage).record == built.record


def test_a_note_beside_the_attribute_is_the_users_own(storage, built):
    edit(storage, ROOT_KEY, lambda root: root["attributes"].update(note="mine"))
    assert read_metadata(storage).record == built.record


@pytest.mark.parametrize(("field", "value"), [("zarr_format", 2), ("node_type", "array")])
def test_a_root_that_is_no_zarr_group_is_named(storage, field, value):
    edit(storage, ROOT_KEY, lambda root: root.update({field: value}))
    with pytest.raises(DamagedStoreError, match=rf"zarr\.json of .* has {field} {value!r}"):
        read_metadata(storage)


@pytest.mark.parametrize(("field", "value"), [("shard_size", 0), ("chunk_tokens", 0), ("codec", "gzip")])
def test_a_layout_that_cannot_be_is_damage(storage, field, value):
    edit(storage, ROOT_KEY, lambda root: root["attributes"][ATTRIBUTE]["layout"].update({field: value}))
    with pytest.raises(DamagedStoreError, match=r"is malformed: (layout: |codec 'gzip' is unknown)"):
        read_metadata(storage)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_in_any_metadata_is_an_error(storage, built, data: st.DataObject):
    key = data.draw(st.sampled_from([ROOT_KEY, *map(node_key, record_nodes(built.record))]))
    before = storage.read(key)
    place, bit = data.draw(st.integers(0, len(before) - 1)), data.draw(st.integers(0, 7))
    flipped = bytearray(before)
    flipped[place] ^= 1 << bit
    storage.path(key).write_bytes(bytes(flipped))
    try:
        with pytest.raises((ValueError, FileNotFoundError)):
            read_metadata(storage)
    finally:
        storage.path(key).write_bytes(before)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("phase", ["states", "complete"])
def test_a_crash_at_any_step_leaves_a_root_that_reads_and_a_copy_that_is_not_behind_it(
    tmp_path, monkeypatch, built, phase: Any
):
    before, after = replace(built.record, phase=phase), replace(built.record, producers=({"host": "next"},))
    put, steps, storage = LocalStorage.put, 0, LocalStorage(tmp_path)
    while steps < 100:
        storage = LocalStorage(tmp_path / str(steps))
        write_metadata(storage, before)
        left = iter(range(steps))

        def killed(self: LocalStorage, key: str, data: bytes, left: Any = left) -> None:
            if next(left, None) is None:
                raise Killed
            put(self, key, data)

        with monkeypatch.context() as patch, suppress(Killed):
            patch.setattr(LocalStorage, "put", killed)
            write_metadata(storage, after)
            break
        root, copy = (json.loads(storage.read(key)) for key in (ROOT_KEY, COPY_KEY))
        assert read_record(storage) == before
        record = parse_record(copy["attributes"][ATTRIBUTE], "the copy")
        assert record in (before, after)
        assert copy == root or record == after
        steps += 1
    assert steps >= 2
    assert storage.read(ROOT_KEY) == storage.read(COPY_KEY)


def test_a_root_that_is_gone_while_its_copy_is_there_is_damage_and_not_no_store(tmp_path):
    storage = build_store(tmp_path / "store").storage
    storage.delete(ROOT_KEY)
    with pytest.raises(DamagedStoreError, match=r"zarr\.json is missing from .*; run dspark-store repair "):
        read_metadata(storage)
