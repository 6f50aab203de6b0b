"""Which chunks this process has checked: a bit per chunk, shared by all caches of the process."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

from dspark_store.format.objects import StoredObject
from dspark_store.readers.threads import ForkSafeLock

type Verify = bool | Literal["first"]
"""When checksums are looked at: True at every read, "first" at the first one of this process, False never."""


def check_verify(verify: Verify) -> Verify:
    """Return ``verify``; ValueError when it is none of the three."""
    if not isinstance(verify, bool) and verify != "first":
        raise ValueError(f'verify is {verify!r}; choose from True, "first", False')
    return verify


class VerifiedChunks:
    """The chunks of one object that were checked in this process, while its version stays the same."""

    def __init__(self) -> None:
        self._version: Hashable = None
        self._bits = 0
        self._lock = ForkSafeLock()

    def holds(self, version: Hashable, first: int, count: int) -> bool:
        """Tell whether ``count`` chunks from slot ``first`` on were all checked in this version of the object."""
        wanted = (1 << count) - 1
        return self._version == version and self._bits >> first & wanted == wanted

    def add(self, version: Hashable, first: int, count: int) -> None:
        """Note that ``count`` chunks from slot ``first`` on were checked; another version begins anew."""
        with self._lock:
            if self._version != version:
                self._bits = 0
                self._version = version
            self._bits |= (1 << count) - 1 << first


_verified: dict[tuple[str, str], VerifiedChunks] = {}
_lock = ForkSafeLock()


def verified_chunks(store_id: str, stored: StoredObject) -> VerifiedChunks:
    """Return what this process knows of an object: by the store's id and the object's key, whoever opened it."""
    if stored.reader.version() is None:
        return VerifiedChunks()  # it may change unseen: what is known ends with this opening
    with _lock:
        return _verified.setdefault((store_id, stored.key), VerifiedChunks())
