"""Changes that are seen before they are made, and made in order."""

import pickle

import pytest

from dspark_store.format.storage import LocalStorage
from dspark_store.inspection.repair.overlay import Overlay


@pytest.fixture
def storage(tmp_path):
    storage = LocalStorage(tmp_path / "store")
    for key in ("a/one", "a/two", "b/only"):
        storage.put(key, key.encode())
    return storage


@pytest.fixture
def overlay(storage):
    overlay = Overlay(str(storage.root))
    overlay.put("a/one", b"new")
    overlay.put_new("c/first", b"first")
    overlay.link("a/two", "a/three")
    overlay.delete("b/only")
    return overlay


def seen(storage):
    keys = [f"{folder}/{name}" for folder in ("a", "b", "c") for name in storage.list(folder)]
    return {key: storage.read(key) for key in keys}


AFTER = {"a/one": b"new", "a/two": b"a/two", "a/three": b"a/two", "c/first": b"first"}


def test_changes_are_seen_at_once_and_made_later(storage, overlay):
    before = seen(storage)
    assert seen(overlay) == AFTER
    assert seen(storage) == before
    overlay.apply(storage)
    assert seen(storage) == AFTER
    assert storage.path("a/two").samefile(storage.path("a/three"))


def test_a_folder_that_is_left_empty_is_removed_as_no_zarr_reader_knows_it(storage, overlay):
    overlay.apply(storage)
    assert not storage.path("b").exists()


def test_a_removed_object_is_missing(overlay):
    assert not overlay.exists("b/only")
    for read in (overlay.read, overlay.open):
        with pytest.raises(FileNotFoundError, match="b/only is removed"):
            read("b/only")


def test_an_object_that_exists_is_not_published_again(overlay):
    with pytest.raises(FileExistsError):
        overlay.put_new("a/two", b"again")


def test_what_is_read_in_pieces_is_what_was_written_in_pieces(overlay):
    writer = overlay.create("c/pieces")
    writer.write(b"01", b"23")
    writer.write(b"45")
    assert not overlay.exists("c/pieces")
    writer.commit()
    reader = overlay.open("c/pieces")
    buffers = [bytearray(2), bytearray(3)]
    assert (reader.size, reader.read(1, 3), reader.read(4, 9)) == (6, b"123", b"45")
    assert reader.read_vector(buffers, 2) == 4
    assert buffers == [bytearray(b"23"), bytearray(b"45\0")]


def test_temporary_files_are_swept_when_the_changes_are_made(storage, overlay):
    (storage.root / "a" / ".one.0123.tmp").write_bytes(b"half")
    assert overlay.sweep() == 1
    assert len(list(storage.temporaries())) == 1
    overlay.apply(storage)
    assert list(storage.temporaries()) == []


def test_an_overlay_travels_with_its_changes(overlay):
    assert seen(pickle.loads(pickle.dumps(overlay))) == AFTER
    assert pickle.loads(pickle.dumps(overlay)) == overlay


def test_an_object_that_is_not_written_yet_is_not_linked_to(overlay):
    with pytest.raises(ValueError, match="a/one is changed"):
        overlay.link("a/one", "a/four")
