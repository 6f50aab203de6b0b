"""Storage under measurement: its rate, a line of a fixed rate in front of it, and what files take on it."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Buffer, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dspark_store.format.files import LocalObject
from dspark_store.format.storage import LocalStorage

_READERS, _READ_BYTES = 8, 4 * 2**20


class RateLimit:
    """A line of ``bytes_per_second`` that all readers share, each request ``latency`` seconds late.

    ``total`` counts the bytes that went over it.
    """

    def __init__(self, bytes_per_second: float, latency: float = 0.0) -> None:
        self._rate, self._latency = bytes_per_second, latency
        self._free_at = 0.0
        self._lock = threading.Lock()
        self.total = 0

    def reset(self, bytes_per_second: float | None = None) -> None:
        """Forget what has been counted; take another rate where one is given."""
        with self._lock:
            self.total = 0
            self._free_at = 0.0
            self._rate = self._rate if bytes_per_second is None else bytes_per_second

    def take(self, nbytes: int) -> None:
        """Wait until ``nbytes`` more have come over the line."""
        self.wait(self.reserve(nbytes))

    def reserve(self, nbytes: int) -> float:
        """Send ``nbytes`` over the line; return the time at which they will have come, for `wait`."""
        with self._lock:
            self.total += nbytes
            self._free_at = max(self._free_at, time.perf_counter()) + nbytes / self._rate
            return self._free_at + self._latency

    def wait(self, until: float) -> None:
        """Wait for a time that `reserve` returned."""
        if (left := until - time.perf_counter()) > 0:
            time.sleep(left)


class RateLimitedObject(LocalObject):
    """An object whose reads go over the line."""

    __slots__ = ("_limit",)

    def __init__(self, storage: LocalStorage, key: str, limit: RateLimit) -> None:
        super().__init__(storage.path(key))
        self._limit = limit

    def read(self, offset: int, length: int) -> bytes:
        """See `LocalObject`."""
        data = super().read(offset, length)
        self._limit.take(len(data))
        return data

    def read_into(self, buffer: Buffer, offset: int) -> int:
        """See `LocalObject`."""
        count = super().read_into(buffer, offset)
        self._limit.take(count)
        return count

    def read_vector(self, buffers: Sequence[Buffer], offset: int) -> int:
        """See `LocalObject`."""
        count = super().read_vector(buffers, offset)
        self._limit.take(count)
        return count


class RateLimitedStorage(LocalStorage):
    """A local store behind the line; also counts what is read from it."""

    def __init__(self, root: Path, limit: RateLimit) -> None:
        super().__init__(root)
        self._limit = limit

    def open(self, key: str) -> RateLimitedObject:
        """See `LocalStorage`."""
        return RateLimitedObject(self, key, self._limit)


def measured_rate(place: Path, readers: int = _READERS, nbytes: int = 256 * 2**20) -> float:
    """Return bytes per second: a file is written, dropped from the page cache, and read by several threads at once.

    What stands below the kernel may still hold the file in memory: a cache of the host, or of a file server.
    """
    block = os.urandom(_READ_BYTES)
    with tempfile.NamedTemporaryFile(dir=place) as file:
        for _ in range(max(1, nbytes // _READ_BYTES)):
            file.write(block)
        file.flush()
        drop_from_cache(Path(file.name))
        size = file.tell()
        started = time.perf_counter()
        with ThreadPoolExecutor(max(readers, _READERS)) as pool:
            list(pool.map(lambda at: os.pread(file.fileno(), _READ_BYTES, at), range(0, size, _READ_BYTES)))
        return size / (time.perf_counter() - started)


def sync_files(path: Path) -> None:
    """Bring a file, or every file of a directory, to the disk."""
    for descriptor in _descriptors(path):
        os.fsync(descriptor)


def drop_from_cache(path: Path) -> None:
    """Bring a file, or every file of a directory, to the disk, and ask the kernel to drop it from the page cache."""
    for descriptor in _descriptors(path):
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _descriptors(path: Path) -> Iterator[int]:
    for file in path.rglob("*") if path.is_dir() else (path,):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            yield descriptor
            os.close(descriptor)


def distinct_files(place: Path, pattern: str = "**/*") -> dict[int, int]:
    """Return the bytes of the files of a directory by inode, so that one with two names counts once."""
    found = [path.stat() for path in place.glob(pattern) if path.is_file()]
    return {stat.st_ino: stat.st_size for stat in found}
