"""What rendering a row may take, and a limit of processor time on a call, whatever the call does."""

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from dspark_store.sources.source import SourceError

MAX_TEXT_BYTES = 32 * 2**20
_LOOK_SECONDS = 0.2
_LOOKS_AGAIN = 25


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """What one row may take.

    Attributes:
        seconds: processor time of its renders.
        renders: how often it is rendered.
        text_bytes: its text, in UTF-8.

    """

    seconds: float = 120
    renders: int = 2000
    text_bytes: int = MAX_TEXT_BYTES


DEFAULT_LIMITS = RenderLimits()


class RenderLimitError(SourceError):
    """Locating the messages of a row would take too many renders."""


class TextLimitError(SourceError):
    """A template writes more text than a row may have."""

    def __init__(self, limit: int) -> None:
        """Name the limit, in bytes."""
        super().__init__(f"the chat template writes more than {limit:,} bytes of text; leave the row out or divide it")


class ProcessorTimeError(Exception):
    """A call took more processor time than it may."""


class _Expired(BaseException):
    """Raised inside of the call; no handler of `Exception` keeps it."""


@dataclass(eq=False, slots=True)
class _Call:
    thread: int
    clock: int
    deadline: float
    looks: int = 0  # since it expired


def run_limited[T](call: Callable[[], T], seconds: float) -> T:
    """Return what a call returns, unless it takes more processor time of this thread.

    A second thread looks at the clocks of those that run such calls, and raises an exception inside of them: this
    works in every thread, and wherever Python code runs.

    Raises:
        ProcessorTimeError: it took longer.

    """
    thread = threading.get_ident()
    clock = time.pthread_getcpuclockid(thread)
    running = _Call(thread, clock, time.clock_gettime(clock) + seconds)
    try:
        _watch.begin(running)
        try:
            return call()
        finally:
            _watch.end(running)
    except _Expired:
        _watch.forget(running)
        raise ProcessorTimeError(f"more than {seconds:g} s of processor time") from None


def _raise_in(thread: int, exception: type[BaseException] | None) -> None:
    raised = None if exception is None else ctypes.py_object(exception)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


class _Watch:
    """The thread that looks at the clocks; it runs while there are calls, and a little longer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: set[_Call] = set()
        self._thread: threading.Thread | None = None

    def begin(self, call: _Call) -> None:
        with self._lock:
            self._calls.add(call)
            if self._thread is None or not self._thread.is_alive():  # a fork leaves it behind
                self._thread = threading.Thread(target=self._look, name="processor-time", daemon=True)
                self._thread.start()

    def end(self, call: _Call) -> None:
        """Let go of a call; an exception that is on its way is raised here at the latest."""
        self.forget(call)
        if call.looks:
            raise _Expired

    def forget(self, call: _Call) -> None:
        """Let go of a call, and of an exception that is on its way."""
        with self._lock:
            self._calls.discard(call)
        if call.looks:
            _raise_in(call.thread, None)

    def _look(self) -> None:
        idle = 0
        while True:
            time.sleep(_LOOK_SECONDS)
            with self._lock:
                for call in self._calls:
                    if time.clock_gettime(call.clock) > call.deadline:
                        if call.looks % _LOOKS_AGAIN == 0:  # a finaliser may have swallowed the last one
                            _raise_in(call.thread, _Expired)
                        call.looks += 1
                idle = 0 if self._calls else idle + 1
                if idle > 50:
                    self._thread = None
                    return


_watch = _Watch()
