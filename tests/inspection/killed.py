"""A process that has imported everything and forks copies of a store, each killed at one of its last system calls.

Run as a script: a line of JSON on standard input is [source, destination, n], and its answer the exit status of a copy
that was killed in place of its n-th counted call, counted from 1 (0: not at all). Then it is a line with the number of
calls. Nothing here starts a thread before a fork, so none is lost in one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dspark_store.inspection.rechunk import rechunk
from dspark_store.inspection.shardwise import Workers
from tests.inspection.copies import OTHER

COUNTED_CALLS = ("fsync", "replace", "link", "unlink", "mkdir")
"""The system calls of which every publish consists."""


class Counted:
    """Counts the calls, and ends the process, or raises, in place of the n-th."""

    def __init__(self, nth: int, end: Callable[[], object]) -> None:
        self.calls = 0
        self._nth, self._end = nth, end
        self._lock = threading.Lock()

    def __call__(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with self._lock:
            self.calls += 1
            last = self.calls == self._nth
        if last:
            self._end()
        return call(*args, **options)

    def wrap(self, name: str) -> Callable[..., Any]:
        """Return what stands in for a call of ``os``."""
        real = getattr(os, name)
        return lambda *args, **options: self(real, *args, **options)


def copy_and_die(source: Path, destination: Path, nth: int) -> int:
    """Copy, and be killed at the n-th call; return the number of calls when that did not happen."""
    counted = Counted(nth, lambda: os.kill(os.getpid(), signal.SIGKILL))
    for name in COUNTED_CALLS:
        setattr(os, name, counted.wrap(name))
    rechunk(source, destination, OTHER, workers=Workers(threads=2))
    return counted.calls


def serve() -> None:
    """Copy until standard input ends."""
    for line in sys.stdin:
        source, destination, nth = json.loads(line)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
            os.write(write, str(copy_and_die(Path(source), Path(destination), nth)).encode())
            os._exit(0)
        os.close(write)
        _, status = os.waitpid(child, 0)
        calls = os.read(read, 100).decode()
        os.close(read)
        print(json.dumps([status, int(calls or 0)]), flush=True)


if __name__ == "__main__":
    serve()
