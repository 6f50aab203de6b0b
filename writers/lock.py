"""One job at a time writes to a store: a lock file with a heartbeat."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from dspark_store.format.storage import LocalStorage
from dspark_store.writers.process import ProcessName

LOCK_KEY = ".writer.lock"
_BEAT_SECONDS = 15.0
LEAVING_SECONDS = 20.0
"""What all ranks of a job are given to end, from when its first rank has heard that the lock is lost."""
STALE_SECONDS = 120.0
_LATEST = 4_000_000_000 * 10**9  # of the year 2096: no lock is older than its software


class LostLockError(RuntimeError):
    """Another job has taken the store over; this one must not write to it any more."""


@dataclass(frozen=True, slots=True)
class LockHolder:
    """Who a store's lock names. ``taken`` is when, in seconds since 1970, if the lock says so.

    ``age_seconds`` have passed since its last sign of life. ``stale`` locks are taken over by the next job: the process
    is gone, or of another host and silent for too long.
    """

    host: str
    pid: int
    taken: float | None
    age_seconds: float
    stale: bool


def read_holder(storage: LocalStorage) -> LockHolder | None:
    """Return who holds a store, None when nobody does or the lock names nobody; writes nothing.

    So the age is by this host's clock, and not by that of the file system, which `StoreLock` goes by.
    """
    path = storage.path(LOCK_KEY)
    try:
        found, age = path.read_bytes(), max(0.0, time.time() - path.stat().st_mtime)
        name = ProcessName.from_json(found)
    except (FileNotFoundError, ValueError):
        return None
    return LockHolder(name.host, name.pid, _taken(found), age, stale=_living_holder(found, age) is None)


class StoreLock:
    """Holds a store for one writing job.

    The lock names host, process and the process's start time. A lock whose process is gone (same host) or whose
    heartbeat is older than 120 s by the file system's own clock (another host) is taken over; a live one is refused
    with BlockingIOError naming its holder, unless ``take_over`` says to take that too. ``on_lost`` is told once, on the
    thread of the heartbeat, when another job has done so. A take-over sleeps with ``pause``, which may raise to stop.
    ``remedy`` is what a refusal says to do.
    """

    def __init__(
        self,
        storage: LocalStorage,
        *,
        take_over: bool = False,
        on_lost: Callable[[str], None] | None = None,
        pause: Callable[[float], object] = time.sleep,
        remedy: str = "wait for it, end it, or take over with --take-over",
    ) -> None:
        self._storage = storage
        self._path = storage.path(LOCK_KEY)
        self._take_over = take_over
        self._on_lost = on_lost
        self._pause = pause
        self._remedy = remedy
        self._stop = threading.Event()
        self._beat = threading.Thread(target=self._run, name="lock-heartbeat", daemon=True)
        self._former: ProcessName | None = None
        self.holder = ""

    def __enter__(self) -> Self:
        self.holder = json.dumps({**asdict(ProcessName.own()), "taken": time.time_ns()})
        self._take()
        try:
            self._beat.start()
            self._let_the_former_notice()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def check(self) -> None:
        """Raise LostLockError unless the store is still this job's."""
        check_lock(self._storage, self.holder)

    def release(self) -> None:
        """Give the lock back. One that was taken over, or never taken, is another job's, and stays."""
        with contextlib.suppress(FileNotFoundError):
            if self.holder and self._path.read_bytes() == self.holder.encode():
                self._path.unlink()

    def _take(self) -> None:
        for _ in range(3):
            with contextlib.suppress(FileExistsError):
                self._storage.put_new(LOCK_KEY, self.holder.encode())
                return
            with _one_at_a_time(self._path.parent):
                self._remove_if_stale()
        raise BlockingIOError(
            f"{self._storage.root} could not be locked: another job is starting on it; wait for it, or end it"
        )

    def _end(self) -> None:
        self._stop.set()
        if self._beat.is_alive():
            self._beat.join()
        self.release()

    def _run(self) -> None:
        while not self._stop.wait(_BEAT_SECONDS):
            with contextlib.suppress(OSError):  # a disk that fails for a moment takes the lock from nobody
                try:
                    check_lock(self._storage, self.holder)
                except LostLockError as error:
                    if self._on_lost is not None:
                        self._on_lost(str(error))
                    return
                os.utime(self._path)

    def _remove_if_stale(self) -> None:
        try:
            found = self._path.read_bytes()
            age = max(0.0, self._storage.now() - self._path.stat().st_mtime)
        except FileNotFoundError:
            return
        self._former = _living_holder(found, age)
        if self._former is not None and not self._take_over:
            since = _since(_taken(found))
            raise BlockingIOError(
                f"{self._storage.root} is being written by process {self._former.pid} on {self._former.host}{since} "
                f"(last sign of life {age:.0f} s ago); {self._remedy}"
            )
        self._remove(found)

    def _remove(self, found: bytes) -> None:
        """Remove a lock that was read as ``found``. If it is another by now, another job was quicker, and has it back.

        Its file system may be one without locks between hosts.
        """
        grave = self._path.with_name(f"{LOCK_KEY}.{secrets.token_hex(8)}.tmp")
        try:
            self._path.rename(grave)
        except FileNotFoundError:
            return
        removed = grave.read_bytes()
        if removed != found:
            with contextlib.suppress(FileExistsError):
                self._storage.put_new(LOCK_KEY, removed)
        grave.unlink(missing_ok=True)

    def _let_the_former_notice(self) -> None:
        """Give a living job that was pushed aside the time to look at the lock and to end: then it writes no more."""
        deadline = time.monotonic() + _BEAT_SECONDS + LEAVING_SECONDS
        while self._former is not None and time.monotonic() < deadline:
            if self._former.is_local and not self._former.still_runs:
                return
            self._pause(0.2)


def check_lock(storage: LocalStorage, holder: str) -> None:
    """Raise LostLockError unless the store is still locked by ``holder``.

    Every rank asks before it makes anything visible, and once more before what commits it.
    """
    try:
        found = storage.path(LOCK_KEY).read_bytes()
    except FileNotFoundError:
        raise LostLockError(
            f"{storage.root} was taken over by another job, or its lock was removed; this one ends"
        ) from None
    if found != holder.encode():
        raise LostLockError(f"{storage.root} was taken over by another job; this one ends")


def _living_holder(found: bytes, age: float) -> ProcessName | None:
    """Return whose lock this is, if that job lives; a lock that is not one belongs to nobody."""
    try:
        holder = ProcessName.from_json(found)
    except ValueError:
        return None
    alive = holder.still_runs if holder.is_local else age <= STALE_SECONDS
    return holder if alive else None


def _taken(found: bytes) -> float | None:
    """Return when a lock says that it was taken, in seconds since 1970; None where it says nothing that can be."""
    taken = json.loads(found).get("taken")
    return taken / 1e9 if type(taken) is int and 0 <= taken < _LATEST else None


def _since(taken: float | None) -> str:
    return "" if taken is None else f" since {datetime.fromtimestamp(taken, UTC):%Y-%m-%d %H:%M} UTC"


@contextlib.contextmanager
def _one_at_a_time(directory: Path) -> Iterator[None]:
    """Keep other processes of this host out of the block, so that nobody removes the lock that another just took."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system may have no such locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
