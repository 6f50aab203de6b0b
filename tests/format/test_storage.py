"""The local storage keeps the contract, and survives a power cut by the order of its system calls."""

import errno
import os
import pickle
import shutil
import stat
from collections.abc import Buffer, Callable
from pathlib import Path
from typing import Any

import pytest

from dspark_store.format.storage import LocalStorage
from tests.storage_contract import StorageContract


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "store")


class TestLocalStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> LocalStorage:
        return LocalStorage(tmp_path / "store")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record every durable step in order: what is synced, and what is put in place."""
    seen: list[str] = []

    def record(name: str, describe: Callable[..., str]) -> None:
        original = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            seen.append(describe(*arguments))
            return original(*arguments, **options)

        monkeypatch.setattr(os, name, call)

    record("fsync", lambda descriptor: f"sync {synced(descriptor)}")
    record("replace", lambda source, target: f"rename {Path(target).name}")
    record("link", lambda source, target: f"link {readable(Path(target))}")
    record("unlink", lambda path, **_: f"unlink {readable(Path(path))}")
    return seen


def synced(descriptor: int) -> str:
    path = Path(f"/proc/self/fd/{descriptor}").readlink()
    return f"directory {path.name}" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else readable(path)


def readable(path: Path) -> str:
    return "temporary" if path.name.startswith(".") else path.name


def without_unlinks(calls: list[str]) -> list[str]:
    return [call for call in calls if not call.startswith("unlink")]


def refuse_links(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def link(source: object, target: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)


def test_an_object_is_synced_before_it_is_named_and_its_directory_after(
    storage: LocalStorage, calls: list[str]
) -> None:
    storage.root.mkdir()
    storage.put("a", b"x")
    assert calls[:3] == ["sync temporary", "rename a", "sync directory store"]


def test_a_new_row_is_synced_before_it_is_linked_and_its_directory_last(
    storage: LocalStorage, calls: list[str]
) -> None:
    storage.root.mkdir()
    storage.put_new("a", b"x")
    assert calls == ["sync temporary", "link a", "unlink temporary", "sync directory store"]


def test_new_directories_are_synced_in_the_one_above_them(storage: LocalStorage, calls: list[str]) -> None:
    storage.root.mkdir()
    storage.create("one/two/a").abort()
    assert calls[:2] == ["sync directory store", "sync directory one"]


def test_a_link_is_put_in_place_whole(storage: LocalStorage, calls: list[str]) -> None:
    storage.put("a", b"x")
    calls.clear()
    storage.link("a", "b")
    assert without_unlinks(calls) == ["link temporary", "rename b", "sync directory store"]


def test_a_deletion_is_durable(storage: LocalStorage, calls: list[str]) -> None:
    storage.put("a", b"x")
    calls.clear()
    storage.delete("a")
    assert calls == ["unlink a", "sync directory store"]


def test_temporary_files_stand_beside_their_object_and_no_listing_shows_them(storage: LocalStorage) -> None:
    writer = storage.create("d/a")
    (temporary,) = storage.temporaries()
    assert temporary.parent == storage.path("d")
    assert storage.list("d") == []
    writer.abort()
    assert list(storage.temporaries()) == []


def test_a_failed_sync_leaves_no_object(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    storage.put("a", b"old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        storage.put("a", b"new")
    assert storage.read("a") == b"old"
    assert list(storage.temporaries()) == []


def test_a_link_shares_the_inode(storage: LocalStorage) -> None:
    storage.put("a", b"x")
    storage.link("a", "b/c")
    assert storage.path("a").stat().st_ino == storage.path("b/c").stat().st_ino


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EMLINK])
def test_where_links_do_not_exist_a_link_is_a_synced_copy(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, calls: list[str], code: int
) -> None:
    storage.put("a", b"x")
    calls.clear()
    refuse_links(monkeypatch, code)
    storage.link("a", "b")
    assert storage.read("b") == b"x"
    assert storage.path("a").stat().st_ino != storage.path("b").stat().st_ino
    assert without_unlinks(calls) == ["sync temporary", "rename b", "sync directory store"]


def test_where_links_do_not_exist_a_new_row_still_never_replaces(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_links(monkeypatch, errno.EPERM)
    storage.put_new("a", b"first")
    with pytest.raises(FileExistsError):
        storage.put_new("a", b"second")
    assert storage.read("a") == b"first"
    assert list(storage.temporaries()) == []


def test_a_link_that_fails_for_another_reason_fails(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.put("a", b"x")
    refuse_links(monkeypatch, errno.EACCES)
    with pytest.raises(PermissionError):
        storage.link("a", "b")
    assert storage.list("") == ["a"]


def test_reads_go_on_after_short_counts(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.put("a", bytes(range(50)))
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda descriptor, length, offset: pread(descriptor, min(length, 7), offset))
    monkeypatch.setattr(os, "preadv", lambda descriptor, views, offset: preadv(descriptor, [views[0][:7]], offset))
    reader, buffer = storage.open("a"), bytearray(40)
    assert reader.read(5, 40) == bytes(range(5, 45))
    assert reader.read_into(buffer, 5) == 40
    assert buffer == bytes(range(5, 45))


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 7])
def test_a_vectored_read_goes_on_where_the_kernel_cut_it_short(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    storage.put("a", b"0123456789")
    preadv = os.preadv

    def short(descriptor: int, buffers: list[Buffer], offset: int) -> int:
        room, parts = limit, []
        for buffer in buffers:
            view = memoryview(buffer)[:room]
            parts.append(view)
            room -= len(view)
        return preadv(descriptor, parts, offset)

    monkeypatch.setattr(os, "preadv", short)
    buffers = [bytearray(3), bytearray(1), bytearray(4)]
    assert storage.open("a").read_vector(buffers, 1) == 8
    assert buffers == [b"123", b"4", b"5678"]


def test_free_space_is_that_of_the_disk_before_the_store_exists(storage: LocalStorage, tmp_path: Path) -> None:
    assert abs(storage.free_bytes() - shutil.disk_usage(tmp_path).free) < 1 << 30


def test_the_clock_is_the_file_systems(storage: LocalStorage) -> None:
    storage.put("a", b"x")
    assert abs(storage.now() - storage.path("a").stat().st_mtime) < 60
    assert list(storage.temporaries()) == []


def test_a_storage_travels_as_its_path(storage: LocalStorage) -> None:
    storage.put("a", b"x")
    assert pickle.loads(pickle.dumps(storage)).read("a") == b"x"
