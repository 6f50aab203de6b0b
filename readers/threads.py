"""The threads that read: those of a stage, one that begins batches ahead, and a lock that a fork may break."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self, cast


class ForkSafeLock:
    """A lock, ``with lock.held:``. In a forked process it is open, even if a thread of the parent held it just then.

    That thread does not exist there, and never finishes what it was about: what the lock guards must hold at any point
    of it. ``held`` is the interpreter's own lock, which an interrupt cannot leave closed as it can one written in
    Python.
    """

    __slots__ = ("__weakref__", "held")

    def __init__(self) -> None:
        self.renew()
        _locks.add(self)

    def renew(self) -> None:
        """Open the lock."""
        self.held = threading.Lock()


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _renew_all() -> None:
    for lock in list(_locks):
        lock.renew()


os.register_at_fork(after_in_child=_renew_all)


USABLE_CORES = len(os.sched_getaffinity(0))
DEFAULT_THREADS = min(8, max(2, USABLE_CORES))


class Workers:
    """Runs tasks, which do not raise, in at most ``count`` threads, begun in the order in which they are put.

    Threads start with the first tasks, and anew in a forked process.
    """

    def __init__(self, count: int, name: str) -> None:
        if count < 1:
            raise ValueError(f"threads must be >= 1, got {count}")
        self._count, self._name = count, name
        self._lock = ForkSafeLock()
        self._renew()

    def _renew(self) -> None:
        self._process = os.getpid()
        self._tasks = deque[Callable[[], object]]()
        self._pool: ThreadPoolExecutor | None = None
        self._running = 0

    def put(self, task: Callable[[], object]) -> None:
        """Have a task run."""
        with self._lock.held:
            if self._process != os.getpid():
                self._renew()
            self._tasks.append(task)
            started = self._running >= self._count or self._start()
        if not started:
            self._work(None)

    def _start(self) -> bool:
        """Start a thread; return False when the interpreter is ending and has none: the caller works then."""
        self._running += 1
        try:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._count, self._name)
            self._pool.submit(self._work, self._pool)
        except RuntimeError:
            self._pool = None
            return False
        return True

    def _work(self, pool: ThreadPoolExecutor | None) -> None:
        """Take tasks until there is none, or until the pool was closed: handing over each by itself takes 25 us."""
        while True:
            with self._lock.held:
                if pool is not self._pool:
                    return
                if not self._tasks:
                    self._running -= 1
                    return
                task = self._tasks.popleft()
            task()
            del task  # it may hold a batch

    def close(self) -> None:
        """End the threads, each after the task that it is at; tasks that are left go on in new ones."""
        with self._lock.held:
            if self._process != os.getpid():
                self._renew()
            pool, self._pool, self._running = self._pool, None, 0
            started = all(self._start() for _ in range(min(self._count, len(self._tasks))))
        if not started:
            self._work(None)
        if pool is not None:
            pool.shutdown()


class Pending[T]:
    """A result that tasks are at. It is there when each task that was `expect`-ed is `done`, made by ``finish``."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._left = 1  # the one who starts the tasks
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._result: T | None = None
        self.stopped = False
        """Whether an error came, or nobody wants the result: what has not begun need not."""

    @classmethod
    def of(cls, result: T) -> Self:
        """Return a result that is there."""
        pending = cls(lambda: result)
        pending.done()
        return pending

    def expect(self) -> None:
        """Take note of one task more."""
        with self._lock:
            self._left += 1

    def done(self, error: BaseException | None = None) -> None:
        """Take note that a task is over; of several errors, the first one counts."""
        with self._lock:
            self._left -= 1
            last = not self._left
            if error is not None:
                self._error = self._error or error
                self.stopped = True
        if last:
            finish, self._finish = self._finish, None
            try:
                if finish is not None and not self.stopped:
                    self._result = finish()
            except BaseException as failed:  # noqa: BLE001 - raised by `result`
                self._error = failed
            self._over.set()

    def cancel(self) -> None:
        """Leave out what has not begun."""
        self.stopped = True

    def wait(self) -> None:
        """Wait until no task is at it."""
        self._over.wait()

    def result(self) -> T:
        """Wait for the result and return it, once, or raise the first error."""
        self._over.wait()
        error, result, self._error, self._result = self._error, self._result, None, None
        try:
            if error is not None:
                raise error
            return cast(T, result)
        finally:
            del error  # it holds this frame, and through it the batch


@dataclass(frozen=True, slots=True)
class Ahead[T]:
    """One item to produce: what it takes in memory, and what begins it."""

    nbytes: int
    start: Callable[[], Pending[T]]


class Prefetcher[T]:
    """Begins items in one thread, in order, ahead of its consumer, which waits for each in turn.

    Items begun and not yet taken take at most ``limit_bytes``; one item is always allowed. An exception of the producer
    is raised to the consumer in the place of the item that failed, with its own traceback. After `close`, or the last
    item, no thread is left; the end of the interpreter closes too.
    """

    def __init__(self, work: Iterable[Ahead[T]], limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._ready: deque[tuple[int, Pending[T]]] = deque()
        self._current: Pending[T] | None = None
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
        nbytes = 0
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._finished)
                if self._ready and not self._closed:
                    nbytes, self._current = self._ready.popleft()
            if (item := self._current) is not None:
                made = item.result()
                with self._changed:
                    self._current = None
                    self._bytes -= nbytes
                    self._changed.notify_all()
                if not item.stopped:
                    return made
        except BaseException:
            self.close()  # an item that failed, or Ctrl-C while waiting
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
        begun = [*([self._current] if self._current is not None else []), *(item for _, item in self._ready)]
        for item in begun:
            item.cancel()
        for item in begun:
            item.wait()
        self._ready.clear()
        self._current = None
        self._stopped = True
        atexit.unregister(self.close)

    def _produce(self, work: Iterable[Ahead[T]]) -> None:
        try:
            for ahead in work:
                if not self._wait_for_room(ahead.nbytes):
                    return
                item = ahead.start()
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
