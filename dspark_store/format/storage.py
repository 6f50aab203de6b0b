"""Where objects live: a small protocol, and the local file system behind it.

A key is a POSIX path relative to the store (``index/length/c.0``). Objects are written whole and never changed in
place; until an object is committed no reader sees any of it, and when a write call returns, the object survives a
power cut. tests/storage_contract.py is the contract that a second backend must pass.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import time
from collections.abc import Buffer, Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from dspark_store.format.append import IOV_MAX, open_appender

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV, errno.ENOSYS, errno.EMLINK}
_LINK_ATTEMPTS = 8


class ObjectReader(Protocol):
    """One open object. Reads are positional, so threads may share it."""

    size: int

    def read(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes from ``offset``; fewer at the object's end."""
        ...

    def read_into(self, buffer: Buffer, offset: int) -> int:
        """Fill ``buffer`` from ``offset``; return the bytes read, fewer only at the object's end."""
        ...

    def read_vector(self, buffers: Sequence[Buffer], offset: int) -> int:
        """Fill ``buffers`` one after the other from ``offset``; return the bytes read, as `read_into` does."""
        ...

    def close(self) -> None:
        """Release the object; calling it twice is harmless."""
        ...


class ObjectWriter(Protocol):
    """One object being written. Nothing is visible under its key before `commit`."""

    def write(self, *parts: Buffer) -> None:
        """Append bytes, one part after the other."""
        ...

    def commit(self) -> None:
        """Make the object durable and visible, replacing an older one."""
        ...

    def abort(self) -> None:
        """Drop what was written; harmless after `commit`."""
        ...


@runtime_checkable
class Storage(Protocol):
    """A place for one store's objects. Two storages of the same place are equal."""

    def __hash__(self) -> int: ...

    def open(self, key: str) -> ObjectReader:
        """Open an object; FileNotFoundError when there is none."""
        ...

    def read(self, key: str) -> bytes:
        """Return a whole (small) object; FileNotFoundError when there is none."""
        ...

    def exists(self, key: str) -> bool:
        """Tell whether an object is there."""
        ...

    def list(self, directory: str) -> list[str]:
        """Return the names of the objects directly in a directory, sorted; empty when it does not exist."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write an object, replacing an older one: a reader sees the old one or the new one, whole."""
        ...

    def put_new(self, key: str, data: bytes) -> None:
        """Write an object that must not exist yet: FileExistsError, with the old one untouched, when it does."""
        ...

    def create(self, key: str) -> ObjectWriter:
        """Start writing a large object piece by piece."""
        ...

    def link(self, source: str, key: str) -> None:
        """Make a finished object appear under a second key, sharing its bytes where the storage can."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object durably; harmless when there is none."""
        ...

    def sweep(self) -> int:
        """Remove what interrupted writers left behind; return how many pieces."""
        ...

    def free_bytes(self) -> int:
        """Return the space left, in bytes."""
        ...


class LocalObject:
    """`ObjectReader` of a file."""

    __slots__ = ("_descriptor", "size")

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._descriptor).st_size

    def read(self, offset: int, length: int) -> bytes:
        """See `ObjectReader`."""
        parts: list[bytes] = []
        while length > 0:
            part = os.pread(self._descriptor, length, offset)
            if not part:
                break
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, buffer: Buffer, offset: int) -> int:
        """See `ObjectReader`."""
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def read_vector(self, buffers: Sequence[Buffer], offset: int) -> int:
        """See `ObjectReader`."""
        done = 0
        for first in range(0, len(buffers), IOV_MAX):
            group = buffers[first : first + IOV_MAX]
            wanted = sum(_size(buffer) for buffer in group)
            count = os.preadv(self._descriptor, group, offset + done)
            if count < wanted:
                count += self._read_rest(group, count, offset + done)
            done += count
            if count < wanted:
                break
        return done

    def _read_rest(self, buffers: Sequence[Buffer], done: int, offset: int) -> int:
        """Go on with a vectored read that the kernel cut short after ``done`` bytes; return the bytes that came."""
        begin = came = 0
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            skip = min(len(view), max(0, done - begin))
            count = self.read_into(view[skip:], offset + begin + skip) if skip < len(view) else 0
            came += count
            if skip + count < len(view):
                break
            begin += len(view)
        return came

    def close(self) -> None:
        """See `ObjectReader`."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        descriptor = getattr(self, "_descriptor", -1)  # at the interpreter's end the names of this module are gone
        if descriptor >= 0:
            close(descriptor)


class LocalObjectWriter:
    """`ObjectWriter` of a file: a hidden temporary file, fsync, rename, fsync of the directory."""

    def __init__(self, path: Path, *, large: bool = False) -> None:
        _make_directory(path.parent)
        self._path = path
        self.temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        self._file = self.temporary.open("xb", buffering=0)
        self._appender = open_appender(self._file.fileno(), large=large)

    def write(self, *parts: Buffer) -> None:
        """See `ObjectWriter`."""
        self._appender.append(parts)

    def commit(self) -> None:
        """See `ObjectWriter`."""
        self.finish()
        self.temporary.replace(self._path)
        _sync_directory(self._path.parent)

    def finish(self) -> None:
        """Make the temporary file's content durable and close it. A failed fsync means writing the object again."""
        self._appender.finish()
        os.fsync(self._file.fileno())
        self._appender.close()
        self._file.close()

    def abort(self) -> None:
        """See `ObjectWriter`."""
        self._appender.close()
        with contextlib.suppress(OSError):
            self._file.close()
        self.temporary.unlink(missing_ok=True)


class LocalStorage:
    """`Storage` in a directory of a POSIX file system."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalStorage) and other.root == self.root

    def __hash__(self) -> int:
        return hash(self.root)

    def __str__(self) -> str:
        return str(self.root)

    def __repr__(self) -> str:
        return f"LocalStorage({str(self.root)!r})"

    def path(self, key: str) -> Path:
        """Return the file behind a key."""
        return self.root / key

    def open(self, key: str) -> LocalObject:
        """See `Storage`."""
        return LocalObject(self.path(key))

    def read(self, key: str) -> bytes:
        """See `Storage`."""
        return self.path(key).read_bytes()

    def exists(self, key: str) -> bool:
        """See `Storage`."""
        return self.path(key).is_file()

    def list(self, directory: str) -> list[str]:
        """See `Storage`."""
        try:
            with os.scandir(self.path(directory)) as entries:
                return sorted(entry.name for entry in entries if not _is_temporary(entry.name) and entry.is_file())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def put(self, key: str, data: bytes) -> None:
        """See `Storage`."""
        writer = LocalObjectWriter(self.path(key))
        try:
            writer.write(data)
            writer.commit()
        except BaseException:
            writer.abort()
            raise

    def put_new(self, key: str, data: bytes) -> None:
        """See `Storage`; publishes by ``link``, which refuses to replace."""
        path = self.path(key)
        writer = LocalObjectWriter(path)
        try:
            writer.write(data)
            writer.finish()
            _link_or_rename(writer.temporary, path)
        finally:
            writer.abort()
        _sync_directory(path.parent)

    def create(self, key: str) -> LocalObjectWriter:
        """See `Storage`."""
        return LocalObjectWriter(self.path(key), large=True)

    def link(self, source: str, key: str) -> None:
        """See `Storage`; a hard link, or a copy where the file system has none."""
        path = self.path(key)
        _make_directory(path.parent)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            try:
                _link_standing(self.path(source), temporary)
            except OSError as error:
                # what is replaced all the time can be copied where it cannot be linked: who opens a file, holds it
                if error.errno not in _NO_LINKS and not isinstance(error, FileNotFoundError):
                    raise
                _copy(self.path(source), temporary)
            temporary.replace(path)
        finally:
            # rename() of one hard link onto another of the same file leaves both names
            temporary.unlink(missing_ok=True)
        _sync_directory(path.parent)

    def delete(self, key: str) -> None:
        """See `Storage`."""
        path = self.path(key)
        if path.exists():
            path.unlink()
            _sync_directory(path.parent)

    def sweep(self) -> int:
        """See `Storage`."""
        leftovers = list(self.temporaries())
        for path in leftovers:
            path.unlink(missing_ok=True)
        return len(leftovers)

    def temporaries(self) -> Iterator[Path]:
        """Yield the files that interrupted writers left behind."""
        for directory, _, names in os.walk(self.root):
            yield from (Path(directory, name) for name in names if _is_temporary(name))

    def free_bytes(self) -> int:
        """See `Storage`."""
        place = self.root
        while not place.exists():
            place = place.parent
        return shutil.disk_usage(place).free

    def now(self) -> float:
        """Return the time by the file system's own clock, in seconds since the epoch."""
        probe = self.root / f".clock.{secrets.token_hex(8)}.tmp"
        try:
            probe.touch()
            return probe.stat().st_mtime
        except OSError:
            return time.time()
        finally:
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)


def _size(buffer: Buffer) -> int:
    return buffer.nbytes if isinstance(buffer, np.ndarray) else memoryview(buffer).nbytes


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(".tmp")


def _make_directory(directory: Path) -> None:
    """Create a directory and its parents, each durable in the one above it."""
    missing = []
    place = directory
    while not place.is_dir():
        missing.append(place)
        place = place.parent
    directory.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        _sync_directory(made.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link_standing(source: Path, target: Path) -> None:
    """Link a file, again when it was replaced at that very moment: the kernel then says that there is none."""
    for _ in range(_LINK_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            os.link(source, target)
            return
    os.link(source, target)


def _link_or_rename(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from error
        source.rename(target)


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    with target.open("rb+") as file:
        os.fsync(file.fileno())
