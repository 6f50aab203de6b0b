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
import stat
import time
from collections.abc import Buffer, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from dspark_store.format.damage import IrregularObjectError
from dspark_store.format.files import NO_LINKS, LocalObject, LocalObjectWriter, key_parts, opened_folder, temporary_name

_LINK_ATTEMPTS = 8
_COPIED_AT_ONCE = 1024 * 1024
DOCUMENT_BYTES = 8 * 1024 * 1024
"""The most bytes that a JSON document of a store may have."""


class ObjectReader(Protocol):
    """One open object. Reads are positional, so threads may share it."""

    size: int

    def version(self) -> Hashable:
        """Return what is another value when the object has changed; None where that cannot be told."""
        ...

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

    def finish(self) -> None:
        """Make all that was written durable; nothing is appended any more. Nothing is visible yet."""
        ...

    def commit(self) -> None:
        """Make the object durable, unless it is, and visible, replacing an older one."""
        ...

    def abort(self) -> None:
        """Drop what was written; harmless after `commit`."""
        ...


@runtime_checkable
class Storage(Protocol):
    """A place for one store's objects. Two storages of the same place are equal.

    A key that could lead out of the place (absolute, with an empty name, ``.`` or ``..``) is refused with ValueError.
    """

    def __hash__(self) -> int: ...

    def open(self, key: str) -> ObjectReader:
        """Open an object; FileNotFoundError when there is none, IrregularObjectError when it is no plain file."""
        ...

    def read(self, key: str, limit: int = DOCUMENT_BYTES) -> bytes:
        """Return a whole (small) object of at most ``limit`` bytes; FileNotFoundError when there is none.

        IrregularObjectError, before anything is read, when it is larger.
        """
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
        """Return the file behind a key; ValueError for a key that need not stay in the store."""
        return self.root.joinpath(*key_parts(key))

    def open(self, key: str) -> LocalObject:
        """See `Storage`; a link is followed wherever it points, since a hub's snapshot consists of nothing else."""
        return LocalObject(self.path(key), key)

    def read(self, key: str, limit: int = DOCUMENT_BYTES) -> bytes:
        """See `Storage`."""
        with contextlib.closing(LocalObject(self.path(key), key)) as reader:
            if reader.size > limit:
                raise IrregularObjectError(f"object {key} has {reader.size} bytes, expected at most {limit}")
            return reader.read(0, reader.size)

    def exists(self, key: str) -> bool:
        """See `Storage`."""
        return self.path(key).is_file()

    def list(self, directory: str) -> list[str]:
        """See `Storage`."""
        try:
            with os.scandir(self.path(directory) if directory else self.root) as entries:
                return sorted(entry.name for entry in entries if not _is_temporary(entry.name) and _is_file(entry))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            return []

    def put(self, key: str, data: bytes) -> None:
        """See `Storage`."""
        with self._writing(key) as writer:
            writer.write(data)
            writer.commit()

    def put_new(self, key: str, data: bytes) -> None:
        """See `Storage`; publishes by ``link``, which refuses to replace."""
        with self._writing(key) as writer:
            writer.write(data)
            writer.commit_new()

    @contextlib.contextmanager
    def _writing(self, key: str) -> Iterator[LocalObjectWriter]:
        """Give the writer of an object, and drop what it wrote if anything goes wrong."""
        writer = LocalObjectWriter(self.root, key)
        try:
            yield writer
        except BaseException:
            writer.abort()
            raise

    def create(self, key: str) -> LocalObjectWriter:
        """See `Storage`."""
        return LocalObjectWriter(self.root, key, large=True)

    def link(self, source: str, key: str) -> None:
        """See `Storage`; a hard link, or a copy where the file system has none, or where the source is a link itself.

        So no file outside of the store becomes an object of it.
        """
        with opened_folder(self.root, key, make=True) as (folder, name):
            temporary = temporary_name(name)
            try:
                linked = self._link_standing(source, folder, temporary)
                if linked:
                    os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                # rename() of one hard link onto another of the same file leaves both names
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=folder)
            if linked:
                os.fsync(folder)
                return
        self._copy(source, key)

    def _link_standing(self, source: str, folder: int, temporary: str) -> bool:
        """Link a file, again when it was replaced at that very moment; return whether it can be linked.

        What is replaced all the time can be copied where it cannot be linked: who opens a file, holds it.
        """
        for _ in range(_LINK_ATTEMPTS):
            try:
                with opened_folder(self.root, source) as (place, name):
                    os.link(name, temporary, src_dir_fd=place, dst_dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:  # the kernel says so of a file that is replaced
                continue
            except OSError as error:
                if error.errno not in NO_LINKS and not isinstance(error, NotADirectoryError):
                    raise
                return False
            return stat.S_ISREG(os.stat(temporary, dir_fd=folder, follow_symlinks=False).st_mode)
        return False

    def _copy(self, source: str, key: str) -> None:
        with contextlib.closing(self.open(source)) as reader, self._writing(key) as writer:
            for offset in range(0, reader.size, _COPIED_AT_ONCE):
                writer.write(reader.read(offset, _COPIED_AT_ONCE))
            writer.commit()

    def delete(self, key: str) -> None:
        """See `Storage`; of a link, the link is removed."""
        with contextlib.suppress(FileNotFoundError), opened_folder(self.root, key) as (folder, name):
            os.unlink(name, dir_fd=folder)
            os.fsync(folder)

    def refuse_links(self, key: str) -> None:
        """Raise NotADirectoryError when a folder of this key is a link, through which nothing is written."""
        with contextlib.suppress(FileNotFoundError), opened_folder(self.root, key):
            pass

    def remove_empty_folders(self, key: str) -> None:
        """Remove the folders of a removed object that are empty, up to the root."""
        parts = key_parts(key)
        with contextlib.suppress(OSError):
            for depth in range(len(parts) - 1, 0, -1):
                with opened_folder(self.root, "/".join(parts[:depth])) as (above, name):
                    os.rmdir(name, dir_fd=above)

    def sweep(self) -> int:
        """See `Storage`."""
        leftovers = list(self.temporaries())
        for path in leftovers:
            self.delete(path.relative_to(self.root).as_posix())
        return len(leftovers)

    def temporaries(self) -> Iterator[Path]:
        """Yield the files that interrupted writers left behind; no link to a folder is followed."""
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


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(".tmp")


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False
