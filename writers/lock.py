"""One job at a time writes to a store: a lock file with a heartbeat."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from dspark_store.format.damage import IrregularObjectError
from dspark_store.format.jsonvalue import parse_json
from dspark_store.format.storage import LocalStorage
from dspark_store.writers.process import ProcessName

LOCK_KEY = ".writer.lock"
_log = logging.getLogger(__name__)
_ATTEMPTS = 20
_LOCK_BYTES = 4096
_BEAT_SECONDS = 15.0
_GLANCE_SECONDS = 0.2
_FUTURE_SECONDS = 2.0
"""What a heartbeat may be ahead of its file system's clock: what the coarsest of them rounds to."""
LEAVING_SECONDS = 20.0
"""What all ranks of a job are given to end, from when its first rank has heard that the lock is lost."""
STALE_SECONDS = 120.0
_LATEST = 4_000_000_000 * 10**9  # of the year 2096: no lock is older than its software


class LostLockError(RuntimeError):
    """Another job has taken the store over; this one must not write to it any more."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class _Seen:
    """What stands in a lock's place: what it says, nothing where that is no lock, and when its last heartbeat was."""

    content: bytes
    beat: float

    @classmethod
    def of(cls, storage: LocalStorage, key: str = LOCK_KEY) -> _Seen | None:
        """Look at a lock; None where there is none. Only a file is read, by no link, and no more than a lock has."""
        try:
            found = storage.path(key).lstat()
            try:
                content = storage.read(key, _LOCK_BYTES) if stat.S_ISREG(found.st_mode) else b""
            except IrregularObjectError:
                content = b""
            return cls(content, found.st_mtime)
        except FileNotFoundError:
            return None

    def age(self, now: float) -> float:
        """Return the seconds since the last heartbeat, 0 for one in the future."""
        return max(0.0, now - self.beat)

    def living(self, now: float) -> ProcessName | None:
        """Return whose lock this is, if that job lives; what is no lock belongs to nobody."""
        try:
            holder = ProcessName.from_json(self.content)
        except ValueError:
            return None
        alive = holder.still_runs if holder.is_local else self.age(now) <= STALE_SECONDS
        return holder if alive else None

    def dated_in_the_future(self, now: float) -> bool:
        """Whether it is the lock of a job that only its heartbeat can tell of, and that tells no age."""
        holder = self.living(now)
        return holder is not None and not holder.is_local and self.beat > now + _FUTURE_SECONDS

    @property
    def taken(self) -> float | None:
        """When the lock was taken, in seconds since 1970; None where it says nothing that can be."""
        try:
            fields = parse_json(self.content)
        except ValueError:
            return None
        taken = fields.get("taken") if isinstance(fields, dict) else None
        return taken / 1e9 if type(taken) is int and 0 <= taken < _LATEST else None


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


def read_holder(storage: LocalStorage, *, watch_seconds: float = 0.0) -> LockHolder | None:
    """Return who holds a store, None when nobody does or the lock names nobody; writes nothing.

    So the age is by this host's clock, and not by that of the file system, which `StoreLock` goes by. A lock that is
    dated in the future is watched for ``watch_seconds`` before it is said to be stale or not.
    """
    seen = _Seen.of(storage)
    if seen is None:
        return None
    try:
        name = ProcessName.from_json(seen.content)
    except ValueError:
        return None
    now = time.time()
    stale = seen.living(now) is None
    if watch_seconds and seen.dated_in_the_future(now):
        stale = _is_silent(storage, seen, watch_seconds, time.sleep)
    return LockHolder(name.host, name.pid, seen.taken, seen.age(now), stale)


def _is_silent(storage: LocalStorage, seen: _Seen, seconds: float, pause: Callable[[float], object]) -> bool:
    """Watch a lock, and say so; return whether no heartbeat came."""
    _log.warning(
        "the lock of %s is dated in the future: watching for up to %.0f s whether its job lives", storage.root, seconds
    )
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        pause(min(_GLANCE_SECONDS, seconds))
        if _Seen.of(storage) != seen:
            return False
    return True


class StoreLock:
    """Holds a store for one writing job.

    The lock names host, process and the process's start time. A lock whose process is gone (same host) or whose
    heartbeat is older than 120 s by the file system's own clock (another host) is taken over; a live one is refused
    with BlockingIOError naming its holder, unless ``take_over`` says to take that too. A heartbeat in the future tells
    no age: the lock is watched for ``watch_seconds``, and taken over if none comes. ``on_lost`` is called once, on the
    thread of the heartbeat, when another job has taken the lock. Waiting is done with ``pause``, which may raise to
    stop. ``remedy`` is what a refusal says to do.
    """

    def __init__(
        self,
        storage: LocalStorage,
        *,
        take_over: bool = False,
        on_lost: Callable[[str], None] | None = None,
        pause: Callable[[float], object] = time.sleep,
        remedy: str = "wait for it, end it, or take over with --take-over",
        watch_seconds: float = STALE_SECONDS,
    ) -> None:
        self._storage = storage
        self._path = storage.path(LOCK_KEY)
        self._take_over = take_over
        self._on_lost = on_lost
        self._pause = pause
        self._remedy = remedy
        self._watch_seconds = watch_seconds
        self._stop = threading.Event()
        self._beat = threading.Thread(target=self._run, name="lock-heartbeat", daemon=True)
        self._former: ProcessName | None = None
        self._silent: _Seen | None = None
        self._watched = False
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
        seen = _Seen.of(self._storage) if self.holder else None
        if seen is not None and seen.content == self.holder.encode():
            self._path.unlink(missing_ok=True)

    def _take(self) -> None:
        for _ in range(_ATTEMPTS):
            # whoever holds the store sweeps temporary files, this attempt's too, and may remove a folder that it made
            with contextlib.suppress(FileNotFoundError):
                try:
                    self._storage.put_new(LOCK_KEY, self.holder.encode())
                    return
                except FileExistsError:
                    pass
                self._watch_if_dated_in_the_future()
                with _one_at_a_time(self._path.parent):
                    self._remove_if_stale()
        raise BlockingIOError(
            f"{self._storage.root} could not be locked: other jobs take the lock and give it back; run this again"
        )

    def _watch_if_dated_in_the_future(self) -> None:
        """Find out whether a job lives whose lock's date tells no age. Once is enough: after a beat it does."""
        seen = _Seen.of(self._storage)
        if seen is not None and not self._take_over and not self._watched:
            now = self._storage.now()
            self._watched = seen.dated_in_the_future(now)
            if self._watched and _is_silent(self._storage, seen, self._watch_seconds, self._pause):
                self._silent = seen

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
                os.utime(self._path, follow_symlinks=False)

    def _remove_if_stale(self) -> None:
        seen, now = _Seen.of(self._storage), self._storage.now()
        if seen is None:
            return
        self._former = None if seen == self._silent else seen.living(now)
        if self._former is not None and not self._take_over:
            raise BlockingIOError(
                f"{self._storage.root} is being written by process {self._former.pid} on {self._former.host}"
                f"{_since(seen.taken)} (last sign of life {seen.age(now):.0f} s ago); {self._remedy}"
            )
        self._remove(seen)

    def _remove(self, seen: _Seen) -> None:
        """Remove a lock. If it is not as it was ``seen`` any more, put it back: another job won.

        Its file system may be one without locks between hosts.
        """
        stale = self._path.with_name(f"{LOCK_KEY}.{secrets.token_hex(8)}.tmp")
        if self._path.is_dir() and not self._path.is_symlink():
            raise IsADirectoryError(f"{self._path} is a folder, and no lock: remove it")
        try:
            self._path.rename(stale)
        except FileNotFoundError:
            return
        removed = _Seen.of(self._storage, stale.name)
        if removed is not None and removed.content != seen.content:
            with contextlib.suppress(FileExistsError):
                self._storage.put_new(LOCK_KEY, removed.content)
        stale.unlink(missing_ok=True)

    def _let_the_former_notice(self) -> None:
        """Give a living job that was pushed aside the time to look at the lock and to end: then it writes no more."""
        deadline = time.monotonic() + _BEAT_SECONDS + LEAVING_SECONDS
        while self._former is not None and time.monotonic() < deadline:
            if self._former.is_local and not self._former.still_runs:
                return
            self._pause(_GLANCE_SECONDS)


def check_lock(storage: LocalStorage, holder: str) -> None:
    """Raise LostLockError unless the store is still locked by ``holder``.

    Every rank asks before it makes anything visible, and once more before what commits it.
    """
    seen = _Seen.of(storage)
    if seen is None:
        raise LostLockError(f"{storage.root} was taken over by another job, or its lock was removed; this one ends")
    if seen.content != holder.encode():
        raise LostLockError(f"{storage.root} was taken over by another job; this one ends")


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
