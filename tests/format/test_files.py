"""Nothing is written, renamed or removed through a link below a store's root; objects that are links are read."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark_store.format.damage import DamagedStoreError, IrregularObjectError
from dspark_store.format.storage import LocalStorage

type Contents = dict[str, bytes]


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    storage = LocalStorage(tmp_path / "store")
    storage.put("a/own", b"own")
    return storage


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder of somebody's, with files that have names of a store."""
    outside = tmp_path / "outside"
    (outside / "deeper").mkdir(parents=True)
    for name in ("own", "c.0.0", ".c.0.0.0123456789abcdef.tmp", "deeper/c.1.0"):
        (outside / name).write_bytes(b"precious")
    return outside


def contents(folder: Path) -> Contents:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


WRITES: dict[str, Callable[[LocalStorage, str], object]] = {
    "put": lambda storage, key: storage.put(key, b"new"),
    "put_new": lambda storage, key: storage.put_new(key, b"new"),
    "create": lambda storage, key: storage.create(key),
    "link": lambda storage, key: storage.link("a/own", key),
    "delete": lambda storage, key: storage.delete(key),
}


@pytest.mark.parametrize("key", ["linked/c.0.0", "linked/new", "linked/deeper/c.1.0", "linked/newer/c.0"])
@pytest.mark.parametrize("write", WRITES)
def test_nothing_is_written_through_a_folder_that_is_a_link(storage, outside, write, key: str):
    before = contents(outside)
    storage.root.joinpath("linked").symlink_to(outside)
    with pytest.raises(NotADirectoryError, match=r"store/linked is a link: nothing is written or removed through it"):
        WRITES[write](storage, key)
    assert contents(outside) == before


@pytest.mark.parametrize("write", ["put", "link", "delete"])
def test_what_is_done_to_an_object_that_is_a_link_is_done_to_the_link(storage, outside, write: str):
    before = contents(outside)
    storage.path("a/linked").symlink_to(outside / "c.0.0")
    assert storage.read("a/linked") == b"precious"
    WRITES[write](storage, "a/linked")
    assert contents(outside) == before
    assert not storage.path("a/linked").is_symlink()


def test_a_link_that_leads_nowhere_stands_in_the_way_and_is_removed(storage, tmp_path):
    storage.path("a/dangling").symlink_to(tmp_path / "nothing")
    assert not storage.exists("a/dangling")
    with pytest.raises(FileExistsError):
        storage.put_new("a/dangling", b"new")
    storage.delete("a/dangling")
    assert not storage.path("a/dangling").is_symlink()
    assert not (tmp_path / "nothing").exists()


def test_a_file_outside_becomes_no_object_of_the_store(storage, outside):
    storage.path("a/linked").symlink_to(outside / "c.0.0")
    storage.root.joinpath("linked").symlink_to(outside)
    for source in ("a/linked", "linked/c.0.0"):
        storage.link(source, "a/copy")
        assert storage.read("a/copy") == b"precious"
        assert not storage.path("a/copy").is_symlink()
        assert not storage.path("a/copy").samefile(outside / "c.0.0")
        storage.delete("a/copy")


def test_a_sweep_stays_in_the_store(storage, outside):
    before = contents(outside)
    storage.root.joinpath("linked").symlink_to(outside)
    storage.path("a/.c.0.0.tmp").symlink_to(outside / "c.0.0")
    assert storage.sweep() == 1
    assert contents(outside) == before


def test_only_empty_folders_of_the_store_are_removed(storage, outside):
    (outside / "empty").mkdir()
    storage.root.joinpath("linked").symlink_to(outside)
    storage.remove_empty_folders("linked/empty/c.0")
    assert (outside / "empty").is_dir()
    storage.put("b/c/d", b"x")
    storage.delete("b/c/d")
    storage.remove_empty_folders("b/c/d")
    assert sorted(path.name for path in storage.root.iterdir()) == ["a", "linked"]


def test_a_folder_that_becomes_a_link_while_an_object_is_written_is_not_followed(storage, outside: Path):
    before = contents(outside)
    writer = storage.create("a/c.0.0")
    writer.write(b"new")
    storage.root.joinpath("a").rename(storage.root / "moved")
    storage.root.joinpath("a").symlink_to(outside)
    with pytest.raises(NotADirectoryError):
        writer.commit()
    assert contents(outside) == before


def test_the_root_may_be_a_link(storage, tmp_path):
    (tmp_path / "link").symlink_to(storage.root)
    linked = LocalStorage(tmp_path / "link")
    linked.put("b/c", b"x")
    linked.link("b/c", "d")
    assert (storage.read("b/c"), storage.list("")) == (b"x", ["d"])
    half = linked.create("b/e")
    assert linked.sweep() == 1
    half.abort()


def test_errors_name_the_whole_path(storage):
    (storage.root / "a" / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        storage.put("a/folder", b"x")
    assert str(storage.path("a/folder")) in str(caught.value)


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            server.bind(f"/proc/self/fd/{directory}/{path.name}")  # the path itself may be too long for a socket
        finally:
            os.close(directory)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("make", [a_fifo, a_socket, a_device, a_loop, Path.mkdir])
def test_what_is_no_regular_file_is_refused_at_once(storage, make):
    make(storage.path("a/odd"))
    reads: list[Callable[[str], object]] = [storage.open, storage.read]
    for read in reads:
        with pytest.raises(IrregularObjectError, match=r"object a/odd is a .*, not a regular file"):
            read("a/odd")
    assert not storage.exists("a/odd")
    assert storage.list("a") == ["own"]


def test_what_is_no_regular_file_is_replaced(storage):
    a_fifo(storage.path("a/odd"))
    storage.put("a/odd", b"x")
    assert storage.read("a/odd") == b"x"


def test_a_file_that_is_much_too_large_is_refused_unread(storage):
    with storage.path("a/large").open("wb") as file:
        file.truncate(5 << 30)
    with pytest.raises(DamagedStoreError, match=f"object a/large has {5 << 30} bytes, expected at most"):
        storage.read("a/large")


def test_a_folder_of_links_to_links_to_itself_is_empty(storage):
    a_loop(storage.root / "loop")
    assert storage.list("loop") == []


def test_no_descriptor_is_left_open(storage, outside):
    storage.root.joinpath("linked").symlink_to(outside)
    a_fifo(storage.path("a/odd"))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        for write in WRITES.values():
            with pytest.raises(NotADirectoryError):
                write(storage, "linked/c.0.0")
        with pytest.raises(IrregularObjectError):
            storage.open("a/odd")
        storage.put("a/b", b"x")
        storage.link("a/b", "a/c")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
