"""What ends a job early: a failure on any rank, a rank that is gone or stands still, a signal. Threads look for them.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType, TracebackType
from typing import Self

from dspark_store.precompute.rendezvous import RENDEZVOUS_GONE, Keys
from dspark_store.text import show
from dspark_store.writers.process import ProcessName

FAILED, TERMINATED = 3, 128 + signal.SIGTERM
_LAST_LOOK_SECONDS = 0.5
_TOGETHER = 0.9
"""Share of the longest silence from which on other ranks are named as well: they may wait for the first one, or it for
them."""


class StoppedError(Exception):
    """The job ends here for a reason that lies outside this rank's work; ``exit_code`` is the process's."""

    kind = "stopped"

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: between two looks; and until what is waited for is given up.

    A rank that has to end gets ``failure``, after SIGTERM ``preemption``, of the 10 s that schedulers grant at the
    least, and ``last_acts`` more where its main thread did not. A rank ``silent`` for so long is taken for dead; one
    that works and makes no progress for ``stall`` ends the job. Rank 0 waits ``hearing`` for others to hear of an end.
    """

    period: float = 0.5
    failure: float = 2.5
    preemption: float = 8.0
    last_acts: float = 1.0
    silent: float = 60.0
    stall: float = float("inf")
    hearing: float = 3.0


@dataclass(slots=True)
class _Seen:
    """A text that another rank changes, and since when it is the same, by this process's clock."""

    text: str = ""
    since: float = field(default_factory=time.monotonic)

    def unchanged(self, text: str) -> float:
        """Look at the text again; return for how many seconds it has been the same."""
        if text != self.text:
            self.text, self.since = text, time.monotonic()
        return time.monotonic() - self.since


@dataclass(slots=True)
class _Peer:
    """Another rank: its process, and its sign of life."""

    rank: int
    process: ProcessName | None = None
    beat: _Seen = field(default_factory=_Seen)


class Watch:
    """Looks out for reasons to stop. A context manager; ``keys`` is for the watch alone, None for a rank alone.

    Rank 0 watches every rank's sign of life and progress, the others those of rank 0, and each the processes of its own
    host. An error that leaves the block of one of several ranks is the end of its process: the watch goes on for the
    seconds that a failure is given, and ends a process that is still there.
    """

    def __init__(self, rank: int, size: int, keys: Keys | None, patience: Patience = Patience()) -> None:
        self._rank = rank
        self._size = size
        self._keys = keys
        self._patience = patience
        self._steps = 0
        self._sign: Callable[[], object] | None = None
        self._reason: StoppedError | None = None
        self._last_word = ""
        self._deadline = float("inf")
        self._stopping = threading.Lock()
        self._finished, self._look, self._looked = threading.Event(), threading.Event(), threading.Event()
        self._last_acts: list[Callable[[], None]] = []
        self._peers = [_Peer(peer) for peer in range(size) if peer != rank]
        self._progress = {peer: _Seen() for peer in (range(size) if rank == 0 else (0,))}
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
        if self._keys is None:
            return ""
        try:
            gone = next(filter(None, (self._gone(self._keys, peer) for peer in self._peers)), "")
            self._keys.setdefault("failure", json.dumps({"rank": self._rank, "message": gone or message}))
            self._keys.set(f"heard/{self._rank}", "1")
            return self._failure_elsewhere(self._keys) or gone
        except RuntimeError:
            return RENDEZVOUS_GONE

    def let_others_hear(self) -> None:
        """Wait until every other rank has heard of the failure or is gone, but not long.

        For rank 0, whose process may keep what the others hear it through.
        """
        deadline = time.monotonic() + self._patience.hearing
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
            self._unanswered += not signals and self._keys is not None
            if self._unanswered * self._patience.period > self._patience.silent:
                self.stop(f"the rendezvous of the job has not answered for {self._patience.silent:.0f} s")
            if time.monotonic() > self._deadline and not self._finished.is_set():
                self._leave_now()

    def _terminate(self) -> None:
        """Act on SIGTERM, which torchrun also sends to the ranks that are left when one has failed."""
        if self._keys is not None:
            self._looked.clear()
            self._look.set()
            self._looked.wait(_LAST_LOOK_SECONDS)
        self.stop("terminated: what is committed stays; go on with --resume", TERMINATED, self._patience.preemption)

    def _ask_around(self, keys: Keys) -> None:
        """Show a sign of life and look at those of others, until there is a reason to stop."""
        beat = 0
        while self._reason is None:
            self._look.wait(self._patience.period)
            self._look.clear()
            if self._finished.is_set():
                return
            beat += 1
            try:
                self._look_around(keys, beat)
            except RuntimeError:  # what torch raises when the process that keeps the store is gone
                self.stop(RENDEZVOUS_GONE)
            self._unanswered = 0
            self._looked.set()

    def _look_around(self, keys: Keys, beat: int) -> None:
        sign = self._sign
        keys.set(f"beat/{self._rank}", str(beat))
        keys.set(f"progress/{self._rank}", f"beat {beat}" if sign is None else f"{self._steps} {sign()}")
        elsewhere = self._failure_elsewhere(keys)
        if elsewhere:
            keys.set(f"heard/{self._rank}", "1")
            self.stop(elsewhere)
            return
        why = next(filter(None, (self._gone(keys, peer) for peer in self._peers)), "") or self._stalled(keys)
        if why:
            self.fail(why)
            self.stop(why)

    def _failure_elsewhere(self, keys: Keys) -> str:
        """Return the failure of another rank, with its name; nothing when there is none."""
        failure = keys.get("failure")
        known = json.loads(failure) if failure is not None else {"rank": self._rank}
        return "" if known["rank"] == self._rank else f"rank {known['rank']}: {known['message']}"

    def _gone(self, keys: Keys, peer: _Peer) -> str:
        """Return why a peer is taken for dead, empty while it lives or has ended well."""
        if peer.process is None:
            known = keys.get(f"peer/{peer.rank}")
            if known is None:
                return ""
            peer.process, peer.beat = ProcessName.from_json(known), _Seen()
        if peer.process.is_local:
            dead = not peer.process.still_runs
        elif 0 in (self._rank, peer.rank):
            dead = peer.beat.unchanged(keys.get(f"beat/{peer.rank}") or "") > self._patience.silent
        else:
            dead = False
        if not dead or keys.get(f"left/{peer.rank}") is not None or keys.get("failure") is not None:
            return ""
        return f"rank {peer.rank} (process {peer.process.pid} on {peer.process.host}) is gone"

    def _stalled(self, keys: Keys) -> str:
        """Return which ranks have made no progress for too long, empty when none has.

        Ranks that step together stand still together: all are named. Rank 0 also judges itself; that it cannot is seen
        by others later.
        """
        limit = self._patience.stall + (self._patience.silent if self._rank else 0.0)
        still: dict[int, float] = {}
        for rank, seen in self._progress.items():
            progress = keys.get(f"progress/{rank}")
            if progress is not None:  # else it has not come yet
                still[rank] = seen.unchanged(progress)
        slow = [rank for rank, seconds in still.items() if seconds > limit]
        if all(keys.get(f"left/{rank}") is not None for rank in slow) or keys.get("failure") is not None:
            return ""
        ranks = [str(rank) for rank, seconds in still.items() if seconds > _TOGETHER * limit]
        names = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(ranks)} have"
        return (
            f"{names} made no progress for {self._patience.stall / 60:g} minutes: see the log there, then go on with "
            "--resume, with more --timeout-minutes if that is what a batch takes"
        )

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


def _is_deaf(keys: Keys, peer: _Peer) -> bool:
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
