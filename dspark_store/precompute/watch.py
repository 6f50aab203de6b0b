"""What ends a job early: a failure on any rank, a rank that is gone or stands still, a signal. Threads look for them.

The main thread asks `Watch.check` between batches and while it waits, and leaves in good order. Where it cannot, inside
a collective that will never end, say, a thread ends the process when the time for that is over. That thread waits for
nobody: the one that speaks to the other ranks may wait for an answer for long.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType, TracebackType
from typing import Self

from dspark_store.precompute.peers import PATIENCE, Patience, Peers
from dspark_store.precompute.rendezvous import RENDEZVOUS_GONE, Keys
from dspark_store.text import show

FAILED, TERMINATED = 3, 128 + signal.SIGTERM
_LAST_LOOK_SECONDS = 0.5
_TERMINATION = "terminated: what is committed stays; go on with --resume"


class StoppedError(Exception):
    """The job ends here for a reason that lies outside this rank's work; ``exit_code`` is the process's."""

    kind = "stopped"

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Watch:
    """Looks out for reasons to stop. A context manager; ``keys`` is for the watch alone, None for a rank alone.

    Rank 0 watches every rank's sign of life and progress, the others those of rank 0, and each the processes of its own
    host. An error that leaves the block of one of several ranks is the end of its process: the watch goes on for the
    seconds that a failure is given, and ends a process that is still there.
    """

    def __init__(self, rank: int, size: int, keys: Keys | None, patience: Patience = PATIENCE) -> None:
        self._rank = rank
        self._size = size
        self._peers = None if keys is None else Peers(rank, size, keys, patience)
        self._patience = patience
        self._steps = 0
        self._sign: Callable[[], object] | None = None
        self._reason: StoppedError | None = None
        self._last_word = ""
        self._deadline = float("inf")
        self._stopping = threading.Lock()
        self._finished, self._look, self._looked = threading.Event(), threading.Event(), threading.Event()
        self._last_acts: list[Callable[[], None]] = []
        self._unanswered = 0  # periods since the rendezvous last answered
        self._threads: list[threading.Thread] = []
        self._wakeup: _Wakeup | None = None

    def __enter__(self) -> Self:
        if self._peers is not None:
            self._peers.join()
        self._wakeup = _Wakeup()
        self._start("watch", partial(self._stand_by, self._wakeup))
        if self._peers is not None:
            self._start("watch-peers", partial(self._ask_around, self._peers))
        return self

    def _start(self, name: str, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._peers is not None and error is not None:
            own = isinstance(error, Exception) and not isinstance(error, StoppedError)
            self.stop(_text(error), last_word="error" if own else "stopped")  # a thread sees that the process ends
            return
        if self._peers is not None:
            with contextlib.suppress(RuntimeError):
                self._peers.leave()
        self._finished.set()
        self._look.set()
        if self._wakeup is not None:
            self._wakeup.wake()
        for thread in self._threads:
            thread.join(self._patience.silent)
        if self._wakeup is not None:
            self._wakeup.close()

    def check(self) -> None:
        """Raise StoppedError when there is a reason to stop."""
        if self._reason is not None:
            raise self._reason

    def progress(self) -> None:
        """Count a step of the work, and check."""
        self._steps += 1
        self.check()

    def pause(self, seconds: float) -> None:
        """Sleep while there is nothing to do, and check. Waiting is progress: whoever is waited for is watched too."""
        time.sleep(seconds)
        self.progress()

    @contextmanager
    def working(self, sign: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Have others judge this rank by its progress in the block: by steps that it counts, and changes of ``sign``.

        Outside of such blocks nothing but a process that stands still is no progress: to load a target is one step.
        """
        self._sign = sign
        try:
            yield
        finally:
            self._sign = None

    def fail(self, message: str) -> str:
        """Tell every other rank that this one has failed, unless another was first.

        Returns what ended the job where that is not this rank's failure but, perhaps, its cause; else nothing.
        """
        try:
            return "" if self._peers is None else self._peers.fail(message)
        except RuntimeError:
            return RENDEZVOUS_GONE

    def let_others_hear(self) -> None:
        """Wait until every other rank has heard of the failure or is gone, but not long.

        For rank 0, whose process may keep what the others hear it through.
        """
        deadline = time.monotonic() + self._patience.hearing
        with contextlib.suppress(RuntimeError):
            while self._peers is not None and not self._peers.all_have_heard and time.monotonic() < deadline:
                time.sleep(0.05)

    def stop(
        self, message: str, exit_code: int = FAILED, grace: float | None = None, *, last_word: str = "stopped"
    ) -> None:
        """Give this rank a reason to stop, and ``grace`` seconds to do so: as many as a failure is given, if None.

        Only the first reason counts. It is printed behind ``last_word`` where the process must be ended the hard way,
        as the command prints it where it ends in good order.
        """
        with self._stopping:
            if self._reason is None:
                self._deadline = time.monotonic() + (self._patience.failure if grace is None else grace)
                rank = f"rank {self._rank}: " if self._size > 1 else ""
                self._last_word = f"{last_word}: {rank}{message}"
                self._reason = StoppedError(message, exit_code)

    def before_leaving(self, act: Callable[[], None]) -> None:
        """Have something done also when the process must be ended the hard way."""
        self._last_acts.append(act)

    def _stand_by(self, wakeup: _Wakeup) -> None:
        """Wait for signals, and for the deadline of whoever must stop."""
        while not self._finished.is_set():
            signals = wakeup.wait(self._patience.period)
            if signal.SIGTERM in signals:
                self._terminate()
            self._unanswered += not signals and self._peers is not None
            if self._unanswered * self._patience.period > self._patience.silent:
                self.stop(f"the rendezvous of the job has not answered for {self._patience.silent:.0f} s")
            if time.monotonic() > self._deadline and not self._finished.is_set():
                self._leave_now()

    def _terminate(self) -> None:
        """Act on SIGTERM, which torchrun also sends to the ranks that are left when one has failed."""
        if self._peers is not None:
            self._looked.clear()
            self._look.set()
            self._looked.wait(_LAST_LOOK_SECONDS)
        with self._stopping:
            if str(self._reason).endswith(_TERMINATION):  # of all ranks that were told to end, another was quicker
                self._reason = None
        self.stop(_TERMINATION, TERMINATED, self._patience.preemption)

    def _ask_around(self, peers: Peers) -> None:
        """Show a sign of life and look at those of others, until there is a reason to stop."""
        beat = 0
        while self._reason is None:
            self._look.wait(self._patience.period)
            self._look.clear()
            if self._finished.is_set():
                return
            beat += 1
            try:
                self._look_around(peers, beat)
            except RuntimeError:  # what torch raises when the process that keeps the store is gone
                self.stop(RENDEZVOUS_GONE)
            self._unanswered = 0
            self._looked.set()

    def _look_around(self, peers: Peers, beat: int) -> None:
        sign = self._sign
        peers.show(beat, f"beat {beat}" if sign is None else f"{self._steps} {sign()}")
        if failure := peers.hear():
            self.stop(failure)
        elif reason := peers.look():
            peers.fail(reason)
            self.stop(reason)

    def _leave_now(self) -> None:
        """End the process. The message and the last acts may hang, on a full pipe or a dead disk, and get a moment."""
        acts = threading.Thread(target=self._act_at_last, daemon=True)
        acts.start()
        acts.join(self._patience.last_acts)
        os._exit(FAILED if self._reason is None else self._reason.exit_code)

    def _act_at_last(self) -> None:
        for act in (lambda: show(self._last_word, out=sys.stderr), *self._last_acts):
            with contextlib.suppress(Exception):  # there is nobody left to tell, and the next act is due
                act()


def _text(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return " ".join(str(error).split()) or type(error).__name__


class _Wakeup:
    """Wakes a thread at once for every signal, while Python's handlers wait for the main thread's next line.

    Made on the main thread it takes over SIGTERM until it is closed there; on another one it leaves signals alone.
    """

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._takes_signals = threading.current_thread() is threading.main_thread()
        if self._takes_signals:
            self._old_wakeup = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
            self._old_handler = signal.signal(signal.SIGTERM, _do_nothing)

    def wait(self, seconds: float) -> bytes:
        """Return the numbers of signals that have come, 0 for a `wake`, as soon as there are any."""
        ready, _, _ = select.select([self._read], [], [], seconds)
        return self._read.recv(64) if ready else b""

    def wake(self) -> None:
        """Wake the thread."""
        with contextlib.suppress(BlockingIOError):  # so full that the thread wakes anyway
            self._write.send(b"\0")

    def close(self) -> None:
        """Put back what was there; the handler first, so that no signal falls between the two."""
        if self._takes_signals:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._old_handler is None else self._old_handler)
            signal.set_wakeup_fd(self._old_wakeup)
        self._read.close()
        self._write.close()


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Stand in for the default, which ends the process: the watching thread acts."""
