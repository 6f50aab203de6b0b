"""One job at a time writes to a store: a lock file with a heartbeat."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from dspark_store.format.storage import LocalStorage

LOCK_KEY = ".writer.lock"
_BEAT_SECONDS = 15.0
STALE_SECONDS = 120.0


class StoreLock:
    """Holds a store for one writing job.

    The lock names host, process and the process's start time. A lock whose process is gone (same host) or whose
    heartbeat is older than 120 s by the file system's own clock (another host) is taken over; a live one is refused
    with BlockingIOError naming its holder.
    """

    def __init__(self, storage: LocalStorage) -> None:
        self._storage = storage
        self._path = storage.path(LOCK_KEY)
        self._holder = b""
        self._stop = threading.Event()
        self._beat: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid())}
        self._holder = json.dumps(holder).encode()
        for _ in range(3):
            with contextlib.suppress(FileExistsError):
                self._storage.put_new(LOCK_KEY, self._holder)
                self._beat = threading.Thread(target=self._run, name="lock-heartbeat", daemon=True)
                self._beat.start()
                return self
            with _one_at_a_time(self._path.parent):
                self._remove_if_stale()
        raise BlockingIOError(f"{self._path} could not be taken; another job is starting on the same store")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._beat is not None:
            self._beat.join()
        with contextlib.suppress(FileNotFoundError):
            if self._path.read_bytes() == self._holder:  # a lock that was taken over is another job's
                self._path.unlink()

    def _run(self) -> None:
        while not self._stop.wait(_BEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def _remove_if_stale(self) -> None:
        try:
            holder = json.loads(self._path.read_text())
            age = self._storage.now() - self._path.stat().st_mtime
        except FileNotFoundError:
            return
        except ValueError:
            holder, age = {}, STALE_SECONDS + 1
        same_host = holder.get("host") == socket.gethostname()
        alive = _started(holder["pid"]) == holder["started"] if same_host else age <= STALE_SECONDS
        if alive:
            raise BlockingIOError(
                f"{self._storage.root} is being written by process {holder.get('pid')} on {holder.get('host')} "
                f"(last sign of life {age:.0f} s ago); wait for it or end it"
            )
        self._path.unlink(missing_ok=True)


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


def _started(pid: int) -> str:
    """Return when a process of this host started, in clock ticks since boot; empty when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return str(pid) if _exists(pid) else ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] == "Z" else fields[19]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
