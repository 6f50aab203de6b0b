"""Files of a local store: folders that no link leads out of, objects read by position, objects written whole.

Copying into the page cache costs a third of what compressing costs, and fills memory with bytes that are not read
again soon. A large object therefore goes straight to the disk, from an aligned buffer, where the file system allows it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Buffer, Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from dspark_store.format.damage import IrregularObjectError

NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV, errno.ENOSYS, errno.EMLINK}
"""How a file system says that a file cannot be linked there."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # opening a FIFO waits for nobody
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
IOV_MAX = 1024  # buffers that the kernel takes in one vectored call
_WRITE_BEHIND = 8 * 1024 * 1024
_STAGED = 4 * 1024 * 1024
_staging: list[mmap.mmap] = []  # buffers to use again: to map one anew costs more than the copies into it
_STAGING_KEPT = 16


def key_parts(key: str) -> list[str]:
    """Return the names that a key consists of; ValueError for one that need not stay below the store's root."""
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in key:
        raise ValueError(
            f"{key[:100]!r} is no key of a store: expected names joined by '/', none of them empty, '.' or '..'"
        )
    return parts


@contextlib.contextmanager
def opened_folder(root: Path, key: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """Open the folder of a key; give its descriptor, and the key's name in it.

    The root may be a link; of the folders below it none is followed, and what is done by the descriptor stays in the
    folder that was opened, whatever takes its place meanwhile. With ``make``, missing folders are made, each durable in
    the one above it. NotADirectoryError for a link or a file in a folder's place.
    """
    *folders, name = key_parts(key)
    if make:
        make_directory(root)
    place, descriptor = root, os.open(root, _FOLDER)
    try:
        for folder in folders:
            inner = _enter(descriptor, place, folder, make=make)
            os.close(descriptor)
            place, descriptor = place / folder, inner
        yield descriptor, name
    except OSError as error:  # names are relative to the descriptor, which says nothing to a user
        if isinstance(error.filename, str):
            error.filename = str(place / error.filename)
        if isinstance(error.filename2, str):
            error.filename2 = str(place / error.filename2)
        raise
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """Create a directory and its parents, each durable in the one above it."""
    missing = []
    place = directory
    while not place.is_dir():
        missing.append(place)
        place = place.parent
    directory.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        sync_path(made.parent)


def sync_path(path: Path) -> None:
    """Make a file's content durable, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _enter(above: int, place: Path, folder: str, *, make: bool) -> int:
    flags = _FOLDER | os.O_NOFOLLOW
    try:
        try:
            return os.open(folder, flags, dir_fd=above)
        except FileNotFoundError:
            if not make:
                raise
            with contextlib.suppress(FileExistsError):  # another writer was quicker
                os.mkdir(folder, dir_fd=above)
            os.fsync(above)
            return os.open(folder, flags, dir_fd=above)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        what = "a link" if (place / folder).is_symlink() else "no folder"
        raise NotADirectoryError(
            f"{place / folder} is {what}: nothing is written or removed through it; put the folder itself there"
        ) from error


class LocalObject:
    """`ObjectReader` of a regular file; IrregularObjectError, at once, for anything else. A link to one is followed."""

    __slots__ = ("_descriptor", "size")

    def __init__(self, path: Path, key: str = "") -> None:
        try:
            self._descriptor = os.open(path, _READ)
        except OSError as error:
            what = {errno.ENXIO: "a socket or a device", errno.ELOOP: "a link that leads to itself"}
            if error.errno not in what:
                raise
            raise IrregularObjectError(f"object {key or path} is {what[error.errno]}, not a regular file") from error
        found = os.fstat(self._descriptor)
        self.size = found.st_size
        if not stat.S_ISREG(found.st_mode):
            self.close()
            kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
            raise IrregularObjectError(f"object {key or path} is {kind}, not a regular file")

    def version(self) -> tuple[int, int, int, int]:
        """Return device, inode, size and time of change in nanoseconds."""
        found = os.fstat(self._descriptor)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

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
    """`ObjectWriter` of a file: a hidden temporary file, fsync, rename, fsync of the directory.

    The folder is opened anew at each step, so that a writer holds one descriptor only.
    """

    def __init__(self, root: Path, key: str, *, large: bool = False) -> None:
        self._root, self.key = root, key
        with opened_folder(root, key, make=True) as (folder, name):
            self._temporary = temporary_name(name)
            self._file = os.fdopen(os.open(self._temporary, _CREATE, 0o666, dir_fd=folder), "wb", buffering=0)
        self._appender = open_appender(self._file.fileno(), large=large)

    def write(self, *parts: Buffer) -> None:
        """See `ObjectWriter`."""
        self._appender.append(parts)

    def commit(self) -> None:
        """See `ObjectWriter`."""
        self.finish()
        with opened_folder(self._root, self.key) as (folder, name):
            os.replace(self._temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)

    def commit_new(self) -> None:
        """Make the object durable and visible; FileExistsError when there is one."""
        self.finish()
        with opened_folder(self._root, self.key) as (folder, name):
            _link_or_rename(folder, self._temporary, name)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temporary, dir_fd=folder)
            os.fsync(folder)

    def finish(self) -> None:
        """See `ObjectWriter`. A failed fsync means writing the object again."""
        if self._file.closed:
            return
        self._appender.finish()
        os.fsync(self._file.fileno())
        self._appender.close()
        self._file.close()

    def abort(self) -> None:
        """See `ObjectWriter`."""
        self._appender.close()
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(FileNotFoundError), opened_folder(self._root, self.key) as (folder, _):
            os.unlink(self._temporary, dir_fd=folder)


def _size(buffer: Buffer) -> int:
    return buffer.nbytes if isinstance(buffer, np.ndarray) else memoryview(buffer).nbytes


def temporary_name(name: str) -> str:
    """Return a hidden name for what is not finished, which `LocalStorage.sweep` removes."""
    return f".{name}.{secrets.token_hex(8)}.tmp"


def _link_or_rename(folder: int, source: str, target: str) -> None:
    try:
        os.link(source, target, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        with contextlib.suppress(FileNotFoundError):
            os.stat(target, dir_fd=folder, follow_symlinks=False)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from error
        os.rename(source, target, src_dir_fd=folder, dst_dir_fd=folder)


class CachedAppender:
    """Appends to a file, open for writing and empty, through the page cache.

    The disk begins with the bytes as they come, so that the fsync at an object's end has little left to wait for.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._written = self._started = 0

    def append(self, parts: Sequence[Buffer]) -> None:
        """Append bytes, one part after the other."""
        for first in range(0, len(parts), IOV_MAX):
            self._append_group([memoryview(part).cast("B") for part in parts[first : first + IOV_MAX]])
        if self._written - self._started >= _WRITE_BEHIND:
            _start_writeback(self._descriptor, self._started, self._written - self._started)
            self._started = self._written

    def finish(self) -> None:
        """Hand everything to the file. The caller makes it durable."""

    def close(self) -> None:
        """Let the appender's memory go; what is not yet in the file is dropped."""

    def _append_group(self, views: list[memoryview]) -> None:
        while views:
            count = os.writev(self._descriptor, views)
            self._written += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]


class DirectAppender:
    """Appends to such a file past the page cache (``O_DIRECT``), through a buffer of 4 MiB.

    Raises OSError when the file system has no such writes, or there is no memory for the buffer; the file is then as
    it was. A file system that says so only at a write gets that one and all later ones through the page cache.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory: mmap.mmap | None = _staging_buffer()
        self._buffer = memoryview(self._memory)
        self._filled = 0
        _set_direct(descriptor, wanted=True)  # last: who goes on without this buffer needs a file that is not direct

    def append(self, parts: Sequence[Buffer]) -> None:
        """See `CachedAppender`."""
        for part in parts:
            view = memoryview(part).cast("B")
            while len(view):
                count = min(len(view), _STAGED - self._filled)
                self._buffer[self._filled : self._filled + count] = view[:count]
                self._filled += count
                view = view[count:]
                if self._filled == _STAGED:
                    self._write(self._buffer)
                    self._filled = 0

    def finish(self) -> None:
        """See `CachedAppender`; the end of an object is not aligned, and goes through the page cache."""
        aligned = self._filled - self._filled % mmap.PAGESIZE
        self._write(self._buffer[:aligned])
        _set_direct(self._descriptor, wanted=False)
        self._write(self._buffer[aligned : self._filled])
        self._filled = 0
        memory, self._memory = self._memory, None  # given back once, whatever is called again after a failed fsync
        if memory is not None and len(_staging) < _STAGING_KEPT:
            _staging.append(memory)

    def close(self) -> None:
        """See `CachedAppender`; the memory goes with its last view, which an error's traceback may still hold."""
        self._buffer = memoryview(b"")

    def _write(self, view: memoryview) -> None:
        while len(view):
            try:
                count = os.write(self._descriptor, view)
            except OSError as error:
                if error.errno != errno.EINVAL or not _is_direct(self._descriptor):
                    raise
                _set_direct(self._descriptor, wanted=False)
                continue
            view = view[count:]


def _staging_buffer() -> mmap.mmap:
    """Return memory that is aligned as direct writes need it."""
    with contextlib.suppress(IndexError):
        buffer = _staging.pop()
        if len(buffer) == _STAGED:
            return buffer
    return mmap.mmap(-1, _STAGED)


def open_appender(descriptor: int, *, large: bool) -> CachedAppender | DirectAppender:
    """Return what appends to a file: past the page cache when it may become ``large`` and the file system can."""
    if large and hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):
            return DirectAppender(descriptor)
    return CachedAppender(descriptor)


def _is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def _set_direct(descriptor: int, *, wanted: bool) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)


def _start_writeback(descriptor: int, begin: int, length: int) -> None:
    """Let the disk begin with these bytes: Linux does when it is told that they are not needed."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # advice: a file system may not take it
            os.posix_fadvise(descriptor, begin, length, os.POSIX_FADV_DONTNEED)
