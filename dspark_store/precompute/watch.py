"""What ends a job early: a failure on any rank, a rank that is gone, a signal. Threads look out for all of them.

The main thread asks `Watch.check` between batches and while it waits, and leaves in good order. Where it cannot, inside
a collective that will never end, say, a thread ends the process when the time for that is over. That thread waits for
nobody: the one that speaks to the other ranks may wait for an answer for long.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import FrameType, TracebackType
from typing import Self

from dspark_store.precompute.keyvalue import KeyValue
from dspark_store.text import show
from dspark_store.writers.process import ProcessName

FAILED, TERMINATED = 1, 128 + signal.SIGTERM
PREEMPTION_SECONDS = 8.0  # of the 10 s that schedulers grant at the least
_FAILURE_SECONDS = 6.0
_SILENT_SECONDS = 60.0
_LAST_ACTS_SECONDS = 1.0
_PERIOD = 1.0
_HEARING_SECONDS = 10.0
_LAST_LOOK_SECONDS = 0.5
_RENDEZVOUS_GONE = "the rendezvous of the job is gone: the process that kept it has ended"


class StoppedError(Exception):
    """The job ends here for a reason that lies outside this rank's work; ``exit_code`` is the process's."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(slots=True)
class _Peer:
    """Another rank: its process, and when its sign of life last changed, by this process's clock."""

    rank: int
    process: ProcessName | None = None
    beat: str = ""
    changed: float = field(default_factory=time.monotonic)


class Watch:
    """Looks out for reasons to stop. A context manager; ``keys`` is for the watch alone, None for a rank alone.

    Rank 0 watches every rank's sign of life, the others that of rank 0, and each the processes of its own host. An
    error that leaves the block of one of several ranks is the end of its process: the watch goes on for the seconds
    that a failure is given, and ends a process that is still there.
    """

    def __init__(self, rank: int, size: int, keys: KeyValue | None) -> None:
        self._rank = rank
        self._size = size
        self._keys = keys
        self._reason: StoppedError | None = None
        self._last_word = ""
        self._deadline = float("inf")
        self._stopping = threading.Lock()
        self._finished, self._look, self._looked = threading.Event(), threading.Event(), threading.Event()
        self._last_acts: list[Callable[[], None]] = []
        self._peers = [_Peer(peer) for peer in range(size) if peer != rank]
        self._unanswered = 0  # periods since the rendezvous last answered
        self._threads: list[threading.Thread] = []
        self._wakeup: _Wakeup | None = None

    def __enter__(self) -> Self:
        if self._keys is not None:
            self._keys.set(f"peer/{self._rank}", ProcessName.own().to_json())
        self._wakeup = _Wakeup()
        self._start("watch", partial(self._stand_by, self._wakeup))
        if self._keys is not None:
            self._start("watch-peers", partial(self._ask_around, self._keys))
        return self

    def _start(self, name: str, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._keys is not None and error is not None:
            own = isinstance(error, Exception) and not isinstance(error, StoppedError)
            self.stop(_text(error), last_word="error" if own else "stopped")  # a thread sees that the process ends
            return
        if self._keys is not None:
            with contextlib.suppress(RuntimeError):
                self._keys.set(f"left/{self._rank}", "1")
        self._finished.set()
        self._look.set()
        if self._wakeup is not None:
            self._wakeup.wake()
        for thread in self._threads:
            thread.join(_SILENT_SECONDS)
        if self._wakeup is not None:
            self._wakeup.close()

    def check(self) -> None:
        """Raise StoppedError when there is a reason to stop."""
        if self._reason is not None:
            raise self._reason

    def pause(self, seconds: float) -> None:
        """Sleep, and check."""
        time.sleep(seconds)
        self.check()

    def fail(self, message: str) -> str:
        """Tell every other rank that this one has failed, unless another was first.

        Returns what ended the job where that is not this rank's failure but, perhaps, its cause; else nothing.
        """
        if self._keys is None:
            return ""
        try:
            gone = next(filter(None, (self._gone(self._keys, peer) for peer in self._peers)), "")
            self._keys.swap("failure", "", json.dumps({"rank": self._rank, "message": gone or message}))
            self._keys.set(f"heard/{self._rank}", "1")
            return self._failure_elsewhere(self._keys) or gone
        except RuntimeError:
            return _RENDEZVOUS_GONE

    def let_others_hear(self) -> None:
        """Wait until every other rank has heard of the failure or is gone, but not long.

        For rank 0, whose process may keep what the others hear it through.
        """
        deadline = time.monotonic() + _HEARING_SECONDS
        with contextlib.suppress(RuntimeError):
            while self._keys is not None and time.monotonic() < deadline:
                if not any(_is_deaf(self._keys, peer) for peer in self._peers):
                    return
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
                self._deadline = time.monotonic() + (_FAILURE_SECONDS if grace is None else grace)
                rank = f"rank {self._rank}: " if self._size > 1 else ""
                self._last_word = f"{last_word}: {rank}{message}"
                self._reason = StoppedError(message, exit_code)

    def before_leaving(self, act: Callable[[], None]) -> None:
        """Have something done also when the process must be ended the hard way."""
        self._last_acts.append(act)

    def _stand_by(self, wakeup: _Wakeup) -> None:
        """Wait for signals, and for the deadline of whoever must stop."""
        while not self._finished.is_set():
            signals = wakeup.wait(_PERIOD)
            if signal.SIGTERM in signals:
                self._terminate()
            self._unanswered += not signals and self._keys is not None
            if self._unanswered * _PERIOD > _SILENT_SECONDS:
                self.stop(f"the rendezvous of the job has not answered for {_SILENT_SECONDS:.0f} s")
            if time.monotonic() > self._deadline and not self._finished.is_set():
                self._leave_now()

    def _terminate(self) -> None:
        """Act on SIGTERM, which torchrun also sends to the ranks that are left when one has failed."""
        if self._keys is not None:
            self._looked.clear()
            self._look.set()
            self._looked.wait(_LAST_LOOK_SECONDS)
        self.stop("terminated: what is committed stays; go on with --resume", TERMINATED, PREEMPTION_SECONDS)

    def _ask_around(self, keys: KeyValue) -> None:
        """Show a sign of life and look at those of others, until there is a reason to stop."""
        beat = 0
        while self._reason is None:
            self._look.wait(_PERIOD)
            self._look.clear()
            if self._finished.is_set():
                return
            beat += 1
            try:
                self._look_around(keys, beat)
            except RuntimeError:  # what torch raises when the process that keeps the store is gone
                self.stop(_RENDEZVOUS_GONE)
            self._unanswered = 0
            self._looked.set()

    def _look_around(self, keys: KeyValue, beat: int) -> None:
        keys.set(f"beat/{self._rank}", str(beat))
        elsewhere = self._failure_elsewhere(keys)
        if elsewhere:
            keys.set(f"heard/{self._rank}", "1")
            self.stop(elsewhere)
            return
        for peer in self._peers:
            why = self._gone(keys, peer)
            if why:
                self.fail(why)
                self.stop(why)
                return

    def _failure_elsewhere(self, keys: KeyValue) -> str:
        """Return the failure of another rank, with its name; nothing when there is none."""
        failure = keys.get("failure")
        known = json.loads(failure) if failure is not None else {"rank": self._rank}
        return "" if known["rank"] == self._rank else f"rank {known['rank']}: {known['message']}"

    def _gone(self, keys: KeyValue, peer: _Peer) -> str:
        """Return why a peer is taken for dead, empty while it lives or has ended well."""
        if peer.process is None:
            known = keys.get(f"peer/{peer.rank}")
            if known is None:
                return ""
            peer.process, peer.changed = ProcessName.from_json(known), time.monotonic()
        if peer.process.is_local:
            dead = not peer.process.still_runs
        elif 0 in (self._rank, peer.rank):
            beat = keys.get(f"beat/{peer.rank}") or ""
            if beat != peer.beat:
                peer.beat, peer.changed = beat, time.monotonic()
            dead = time.monotonic() - peer.changed > _SILENT_SECONDS
        else:
            dead = False
        if not dead or keys.get(f"left/{peer.rank}") is not None or keys.get("failure") is not None:
            return ""
        return f"rank {peer.rank} (process {peer.process.pid} on {peer.process.host}) is gone"

    def _leave_now(self) -> None:
        """End the process. The message and the last acts may hang, on a full pipe or a dead disk, and get a moment."""
        acts = threading.Thread(target=self._act_at_last, daemon=True)
        acts.start()
        acts.join(_LAST_ACTS_SECONDS)
        os._exit(FAILED if self._reason is None else self._reason.exit_code)

    def _act_at_last(self) -> None:
        for act in (lambda: show(self._last_word, out=sys.stderr), *self._last_acts):
            with contextlib.suppress(Exception):  # there is nobody left to tell, and the next act is due
                act()


def _text(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return " ".join(str(error).split()) or type(error).__name__


def _is_deaf(keys: KeyValue, peer: _Peer) -> bool:
    """Whether a peer neither has heard of a failure nor has ended."""
    if any(keys.get(f"{sign}/{peer.rank}") is not None for sign in ("heard", "left")):
        return False
    return peer.process is None or not peer.process.is_local or peer.process.still_runs


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
