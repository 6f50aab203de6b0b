"""The threads that fetch and decode."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

DEFAULT_THREADS = 8


class ReadThreads:
    """Runs reads side by side. Threads start with the first batch, and anew in a forked process."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"threads must be >= 1, got {count}")
        self.count = count
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Run the tasks and wait for all of them, then raise the first error, if any."""
        if len(tasks) < 2:
            for task in tasks:
                task()
            return
        futures = [self._threads().submit(task) for task in tasks]
        wait(futures)
        for future in futures:
            future.result()

    def close(self) -> None:
        """End the threads; the next batch would start them again."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown()
        self._pool = None

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None or self._process != os.getpid():
            self._pool = ThreadPoolExecutor(self.count, "read")
            self._process = os.getpid()
        return self._pool
