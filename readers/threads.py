"""The threads that read: a pool for the objects of a batch, one that works ahead, and a lock that a fork may break."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Self


class ForkSafeLock:
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


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _renew_all() -> None:
    for lock in list(_locks):
        lock.renew()


os.register_at_fork(after_in_child=_renew_all)


DEFAULT_THREADS = 8


class ReadThreads:
    """Runs reads side by side. Threads start with the first batch, and anew in a forked process."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"threads must be >= 1, got {count}")
        self.count = count
        self._lock = ForkSafeLock()
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


@dataclass(frozen=True, slots=True)
class Ahead[T]:
    """One item to produce: what it takes in memory, and how it is made."""

    nbytes: int
    make: Callable[[], T]


class Prefetcher[T]:
    """Makes items in one thread, in order, ahead of its consumer.

    Items made and not yet taken take at most ``limit_bytes``; one item is always allowed. An exception of the producer
    is raised to the consumer in the place of the item that failed, with its own traceback. After `close`, or the last
    item, no thread is left; the end of the interpreter closes too.
    """

    def __init__(self, work: Iterable[Ahead[T]], limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._ready: deque[tuple[int, T]] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._closed = False
        self._finished = False
        self._error: BaseException | None = None
        self._stopped = False
        self._process = os.getpid()
        # the thread alone holds the work, and drops it when it ends
        self._thread = threading.Thread(target=self._produce, args=(work,), name="prefetch", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a daemon thread that is ended amid a read can take the process down with it

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._finished)
                if self._ready and not self._closed:
                    nbytes, item = self._ready.popleft()
                    self._bytes -= nbytes
                    self._changed.notify_all()
                    return item
        except BaseException:
            self.close()  # Ctrl-C while waiting
            raise
        error, self._error = self._error, None
        self.close()
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        """Stop producing, wait for the thread, and drop what was made: the consumer gets no more."""
        if self._stopped:  # and the interpreter may have taken this module's names away
            return
        if self._process != os.getpid():  # the thread stayed in the process that was forked, maybe with the lock
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._ready.clear()
        self._stopped = True
        atexit.unregister(self.close)

    def _produce(self, work: Iterable[Ahead[T]]) -> None:
        try:
            for ahead in work:
                if not self._wait_for_room(ahead.nbytes):
                    return
                item = ahead.make()
                with self._changed:
                    self._ready.append((ahead.nbytes, item))
                    self._changed.notify_all()
                del item, ahead
        except BaseException as error:  # noqa: BLE001 - raised by __next__
            self._error = error
        finally:
            with self._changed:
                self._finished = True
                self._changed.notify_all()

    def _wait_for_room(self, nbytes: int) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._bytes or self._bytes + nbytes <= self._limit)
            self._bytes += nbytes
            return not self._closed
