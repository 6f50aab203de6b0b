"""Locks that do not stay locked in a forked process."""

from __future__ import annotations

import os
import threading
import weakref


class ProcessLock:
    """A lock for ``with``. In a forked process it is open, even if a thread of the parent held it at that moment.

    That thread does not exist there, and never finishes what it was about: what the lock guards must hold at any point
    of it.
    """

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Open the lock."""
        self._lock = threading.Lock()


_locks: weakref.WeakSet[ProcessLock] = weakref.WeakSet()


def _renew_all() -> None:
    for lock in list(_locks):
        lock.renew()


os.register_at_fork(after_in_child=_renew_all)
