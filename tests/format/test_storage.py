"""The local storage keeps the contract, and survives a power cut by the order of its system calls."""

import errno
import mmap
import os
import pickle
import re
import shutil
import stat
from collections.abc import Buffer, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_store.format import files as files_module
from dspark_store.format.files import LocalObjectWriter
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
    def link(source: object, target: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)


def test_an_object_is_synced_before_it_is_named_and_its_directory_after(storage, calls: list[str]):
    storage.root.mkdir()
    storage.put("a", b"x")
    assert calls[:3] == ["sync temporary", "rename a", "sync directory store"]


def test_a_new_row_is_synced_before_it_is_linked_and_its_directory_last(storage, calls: list[str]):
    storage.root.mkdir()
    storage.put_new("a", b"x")
    assert calls == ["sync temporary", "link a", "unlink temporary", "sync directory store"]


def test_new_directories_are_synced_in_the_one_above_them(storage, calls):
    storage.root.mkdir()
    storage.create("one/two/a").abort()
    assert calls[:2] == ["sync directory store", "sync directory one"]


def test_a_link_is_put_in_place_whole(storage, calls):
    storage.put("a", b"x")
    calls.clear()
    storage.link("a", "b")
    assert without_unlinks(calls) == ["link temporary", "rename b", "sync directory store"]


def test_a_deletion_is_durable(storage, calls):
    storage.put("a", b"x")
    calls.clear()
    storage.delete("a")
    assert calls == ["unlink a", "sync directory store"]


def test_temporary_files_stand_beside_their_object_and_no_listing_shows_them(storage):
    writer = storage.create("d/a")
    (temporary,) = storage.temporaries()
    assert temporary.parent == storage.path("d")
    assert storage.list("d") == []
    writer.abort()
    assert list(storage.temporaries()) == []


def test_a_failed_sync_leaves_no_object(storage, monkeypatch):
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    storage.put("a", b"old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        storage.put("a", b"new")
    assert storage.read("a") == b"old"
    assert list(storage.temporaries()) == []


def test_a_link_shares_the_inode(storage):
    storage.put("a", b"x")
    storage.link("a", "b/c")
    assert storage.path("a").stat().st_ino == storage.path("b/c").stat().st_ino


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EMLINK])
def test_where_links_do_not_exist_a_link_is_a_synced_copy(storage, monkeypatch, calls, code: int):
    storage.put("a", b"x")
    calls.clear()
    refuse_links(monkeypatch, code)
    storage.link("a", "b")
    assert storage.read("b") == b"x"
    assert storage.path("a").stat().st_ino != storage.path("b").stat().st_ino
    assert without_unlinks(calls) == ["sync temporary", "rename b", "sync directory store"]


def test_where_links_do_not_exist_a_new_row_still_never_replaces(storage, monkeypatch: pytest.MonkeyPatch):
    refuse_links(monkeypatch, errno.EPERM)
    storage.put_new("a", b"first")
    with pytest.raises(FileExistsError):
        storage.put_new("a", b"second")
    assert storage.read("a") == b"first"
    assert list(storage.temporaries()) == []


def test_a_link_that_fails_for_another_reason_fails(storage, monkeypatch):
    storage.put("a", b"x")
    refuse_links(monkeypatch, errno.EACCES)
    with pytest.raises(PermissionError):
        storage.link("a", "b")
    assert storage.list("") == ["a"]


def test_reads_go_on_after_short_counts(storage, monkeypatch):
    storage.put("a", bytes(range(50)))
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda descriptor, length, offset: pread(descriptor, min(length, 7), offset))
    monkeypatch.setattr(os, "preadv", lambda descriptor, views, offset: preadv(descriptor, [views[0][:7]], offset))
    reader, buffer = storage.open("a"), bytearray(40)
    assert reader.read(5, 40) == bytes(range(5, 45))
    assert reader.read_into(buffer, 5) == 40
    assert buffer == bytes(range(5, 45))


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 7])
def test_a_vectored_read_goes_on_where_the_kernel_cut_it_short(storage, monkeypatch, limit: int):
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


def test_free_space_is_that_of_the_disk_before_the_store_exists(storage, tmp_path):
    assert abs(storage.free_bytes() - shutil.disk_usage(tmp_path).free) < 1 << 30


def test_the_clock_is_the_file_systems(storage):
    storage.put("a", b"x")
    assert abs(storage.now() - storage.path("a").stat().st_mtime) < 60
    assert list(storage.temporaries()) == []


def test_a_storage_travels_as_its_path(storage):
    storage.put("a", b"x")
    assert pickle.loads(pickle.dumps(storage)).read("a") == b"x"


def parts_of(data: bytes, size: int) -> list[bytes]:
    return [data[first : first + size] for first in range(0, len(data), size)]


def test_more_parts_than_one_system_call_takes_are_written_in_order(storage):
    data = os.urandom(5000)
    writer = storage.create("a")
    writer.write(*parts_of(data, 2))
    writer.write()
    writer.write(b"", b"the end", b"")
    writer.commit()
    assert storage.read("a") == data + b"the end"


def test_parts_of_any_shape_are_written_as_their_bytes(storage):
    array = np.arange(12, dtype="<u2").reshape(3, 4)
    writer = storage.create("a")
    writer.write(array, memoryview(array), bytearray(b"x"))
    writer.commit()
    assert storage.read("a") == array.tobytes() * 2 + b"x"


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 7])
def test_a_write_goes_on_where_the_kernel_cut_it_short(storage, monkeypatch, limit: int):
    writev = os.writev

    def short(descriptor: int, views: list[memoryview]) -> int:
        room, parts = limit, []
        for view in views:
            parts.append(view[:room])
            room -= len(parts[-1])
        return writev(descriptor, parts)

    monkeypatch.setattr(os, "writev", short)
    writer = LocalObjectWriter(storage.root, "a")
    writer.write(b"012", b"", b"3", b"45678", b"9")
    writer.write(b"ab")
    writer.commit()
    assert storage.read("a") == b"0123456789ab"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_is_full_in_the_midst_of_a_write_is_told(storage, monkeypatch, code: int):
    writev, counts = os.writev, iter([3, -1])

    def fill(descriptor: int, views: list[memoryview]) -> int:
        room = next(counts)
        if room < 0:
            raise OSError(code, os.strerror(code))
        return writev(descriptor, [views[0][:room]])

    monkeypatch.setattr(os, "writev", fill)
    writer = LocalObjectWriter(storage.root, "a")
    with pytest.raises(OSError, match=re.escape(os.strerror(code))) as caught:
        writer.write(b"0123456789")
    assert caught.value.errno == code
    writer.abort()
    assert not storage.exists("a")
    assert list(storage.temporaries()) == []


@pytest.fixture
def advice(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record which ranges the kernel is told to write, of at least 10 bytes."""
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(files_module, "_WRITE_BEHIND", 10)
    monkeypatch.setattr(os, "posix_fadvise", lambda _, begin, length, advice: seen.append((begin, length)))
    return seen


def test_the_disk_begins_with_every_few_bytes_once_and_in_order(storage, advice: list[tuple[int, int]]):
    writer = LocalObjectWriter(storage.root, "a")
    for count in (4, 5, 3, 25, 9, 1):
        writer.write(bytes(count))
    writer.commit()
    assert advice == [(0, 12), (12, 25), (37, 10)]


def test_a_file_system_that_takes_no_advice_is_written_all_the_same(storage, advice, monkeypatch: pytest.MonkeyPatch):
    def refuse(*arguments: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    storage.put("a", bytes(50))
    monkeypatch.delattr(os, "posix_fadvise")
    storage.put("b", bytes(50))
    assert storage.read("a") == storage.read("b") == bytes(50)


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> int:
    """Make the buffer of large objects as small as it can be."""
    monkeypatch.setattr(files_module, "_STAGED", mmap.PAGESIZE)
    return mmap.PAGESIZE


@pytest.mark.parametrize("more", [-1, 0, 1, 3 * mmap.PAGESIZE + 7])
def test_a_large_object_holds_its_parts_wherever_its_buffer_was_full(storage, staged, more: int):
    data = os.urandom(2 * staged + more)
    writer = storage.create("a")
    writer.write(*parts_of(data, 1000))
    writer.commit()
    assert storage.read("a") == data


def test_a_file_system_without_direct_writes_is_written_through_the_cache(
    storage, staged, monkeypatch: pytest.MonkeyPatch
):
    def refuse(descriptor: int, *, wanted: bool) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(files_module, "_set_direct", refuse)
    data = os.urandom(5 * staged)
    writer = storage.create("a")
    writer.write(data)
    writer.commit()
    assert storage.read("a") == data


def test_a_file_system_that_refuses_direct_writes_late_is_written_through_the_cache(
    storage, staged, monkeypatch: pytest.MonkeyPatch
):
    write, refused, state = os.write, [], {"direct": False}

    def refuse(descriptor: int, view: memoryview) -> int:
        if state["direct"]:
            refused.append(len(view))
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(descriptor, view)

    monkeypatch.setattr(files_module, "_set_direct", lambda descriptor, *, wanted: state.update(direct=wanted))
    monkeypatch.setattr(files_module, "_is_direct", lambda descriptor: state["direct"])
    monkeypatch.setattr(os, "write", refuse)
    data = os.urandom(5 * staged)
    writer = storage.create("a")
    writer.write(data)
    writer.commit()
    assert storage.read("a") == data
    assert refused == [staged]


def test_no_two_objects_share_a_buffer_after_a_failed_fsync(storage, staged, monkeypatch: pytest.MonkeyPatch):
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    broken, others = storage.create("a"), [os.urandom(staged // 2) for _ in range(2)]
    broken.write(bytes(staged // 2))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output"):
                broken.commit()
    writers = [storage.create(name) for name in "bc"]
    for writer, data in zip(writers, others, strict=True):
        writer.write(data)
    for writer in writers:
        writer.commit()
    broken.abort()
    assert [storage.read(name) for name in "bc"] == others


def test_without_memory_for_its_buffer_a_large_object_is_written_through_the_cache(
    storage, monkeypatch: pytest.MonkeyPatch
):
    asked: list[bool] = []

    def no_memory(*arguments: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(files_module, "_staging", [])
    monkeypatch.setattr(mmap, "mmap", no_memory)
    monkeypatch.setattr(files_module, "_set_direct", lambda descriptor, *, wanted: asked.append(wanted))
    data = os.urandom(10_000)
    writer = storage.create("a")
    writer.write(data)
    writer.commit()
    assert storage.read("a") == data
    assert asked == []


def test_a_full_disk_is_told_by_a_large_object_too(storage, staged, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int, view: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = storage.create("a")
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left") as caught:
        writer.write(bytes(staged))
    writer.abort()
    assert caught.tb is not None  # it still holds what was being written
    assert list(storage.temporaries()) == []


def test_a_link_that_fails_for_a_moment_is_tried_again(storage, monkeypatch):
    storage.put("a", b"content")
    real, failures = os.link, iter([True, True])

    def link(source: str, target: str, **options: Any) -> None:
        if next(failures, False):
            raise FileNotFoundError(errno.ENOENT, "replaced at this moment")
        real(source, target, **options)

    monkeypatch.setattr(os, "link", link)
    storage.link("a", "b")
    assert storage.read("b") == b"content"


def test_writing_behind_changes_no_byte(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(100_000)
    monkeypatch.setattr(files_module, "_WRITE_BEHIND", 1000)
    writer = LocalObjectWriter(storage.root, "a")
    for part in parts_of(data, 777):
        writer.write(part)
    writer.commit()
    assert storage.read("a") == data
