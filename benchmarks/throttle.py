"""Storage of a fixed rate: what a shared file system or an object store gives one reader."""

from __future__ import annotations

import threading
import time
from collections.abc import Buffer, Sequence

from dspark_store.format.storage import LocalObject, LocalStorage


class RateLimit:
    """A line of ``bytes_per_second`` that everybody who reads must share."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
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
            return self._free_at

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

    def __init__(self, root: str, limit: RateLimit) -> None:
        super().__init__(root)
        self._limit = limit

    def open(self, key: str) -> RateLimitedObject:
        """See `LocalStorage`."""
        return RateLimitedObject(self, key, self._limit)
