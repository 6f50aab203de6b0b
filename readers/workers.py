"""The threads that fetch and decode."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from dspark_store.readers.forks import ProcessLock

DEFAULT_THREADS = 8


class ReadThreads:
    """Runs reads side by side. Threads start with the first batch, and anew in a forked process."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"threads must be >= 1, got {count}")
        self.count = count
        self._lock = ProcessLock()
        self._pool: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Run the tasks and wait for all of them, then raise the first error, if any."""
        if len(tasks) < 2:
            for task in tasks:
                task()
            return
        left, errors = iter(tasks), list[BaseException]()

        def work() -> None:
            for task in left:  # every thread takes the next one: handing each over by itself takes 25 us
                try:
                    task()
                except BaseException as error:  # noqa: BLE001 - raised below, where somebody waits
                    errors.append(error)

        with self._lock:
            if self._pool is None or self._process != os.getpid():
                self._pool, self._process = ThreadPoolExecutor(self.count, "read"), os.getpid()
            futures = [self._pool.submit(work) for _ in range(min(self.count, len(tasks)))]
        wait(futures)
        try:
            if errors:
                raise errors[0]
        finally:
            errors.clear()  # an error holds this frame, and through it the batch

    def close(self) -> None:
        """End the threads, once they have done what they were given; the next batch would start them again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None and self._process == os.getpid():
            pool.shutdown()
