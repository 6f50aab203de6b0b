"""What ranks show one another through the keys that they share: that they live, how far they are, what has failed."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field

from dspark_store.precompute.rendezvous import Keys
from dspark_store.writers.process import ProcessName

_TOGETHER = 0.9
_TOGETHER_LOOKS = 4
"""Share of the longest silence from which on other ranks are named as well, and looks before its end if that is sooner:
they may wait for the first one, or it for them."""


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


PATIENCE = Patience()


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


class Peers:
    """The other ranks, as one rank sees them. Every method raises RuntimeError once the rendezvous is gone.

    Rank 0 judges every rank's sign of life and progress, the others those of rank 0, and each the processes of its own
    host.
    """

    def __init__(self, rank: int, size: int, keys: Keys, patience: Patience) -> None:
        self._rank = rank
        self._keys = keys
        self._patience = patience
        self._peers = [_Peer(peer) for peer in range(size) if peer != rank]
        self._progress = {peer: _Seen() for peer in (range(size) if rank == 0 else (0,))}

    def join(self) -> None:
        """Show this rank's process to the others, and a first sign of life, so that it is judged from here on."""
        self._keys.set(f"peer/{self._rank}", ProcessName.own().to_json())
        self.show(0, "beat 0")

    def leave(self) -> None:
        """Show that this rank has ended well."""
        self._keys.set(f"left/{self._rank}", "1")

    def show(self, beat: int, progress: str) -> None:
        """Show that this rank lives, and how far it is: texts that must be others each time."""
        self._keys.set(f"beat/{self._rank}", str(beat))
        self._keys.set(f"progress/{self._rank}", progress)

    def fail(self, message: str) -> str:
        """Tell every other rank that this one has failed, unless another was first.

        Returns what ended the job where that is not this rank's failure but, perhaps, its cause; else nothing.
        """
        gone = self._any_gone()
        self._keys.setdefault("failure", json.dumps({"rank": self._rank, "message": gone or message}))
        self._keys.set(f"heard/{self._rank}", "1")
        return self._failure_elsewhere() or gone

    def hear(self) -> str:
        """Return the failure of another rank, with its name, and show that it was heard; nothing when there is none."""
        failure = self._failure_elsewhere()
        if failure:
            self._keys.set(f"heard/{self._rank}", "1")
        return failure

    def look(self) -> str:
        """Return which rank is gone or stands still, and so ends the job; nothing when all go on."""
        return self._any_gone() or self._stalled()

    @property
    def all_have_heard(self) -> bool:
        """Whether every other rank has heard of a failure or has ended."""
        return not any(self._is_deaf(peer) for peer in self._peers)

    def _any_gone(self) -> str:
        return next(filter(None, map(self._gone, self._peers)), "")

    def _failure_elsewhere(self) -> str:
        """Return the failure of another rank, with its name; nothing when there is none."""
        failure = self._keys.get("failure")
        known = json.loads(failure) if failure is not None else {"rank": self._rank}
        return "" if known["rank"] == self._rank else f"rank {known['rank']}: {known['message']}"

    def _gone(self, peer: _Peer) -> str:
        """Return why a peer is taken for dead, empty while it lives or has ended well."""
        if peer.process is None:
            known = self._keys.get(f"peer/{peer.rank}")
            if known is None:
                return ""
            peer.process, peer.beat = ProcessName.from_json(known), _Seen()
        if peer.process.is_local:
            dead = not peer.process.still_runs
        elif 0 in (self._rank, peer.rank):
            dead = peer.beat.unchanged(self._keys.get(f"beat/{peer.rank}") or "") > self._patience.silent
        else:
            dead = False
        if not dead or self._keys.get(f"left/{peer.rank}") is not None or self._keys.get("failure") is not None:
            return ""
        return f"rank {peer.rank} (process {peer.process.pid} on {peer.process.host}) is gone"

    def _stalled(self) -> str:
        """Return which ranks have made no progress for too long, empty when none has.

        Ranks that step together stand still together: all are named. Rank 0 also judges itself; that it cannot is seen
        by others later.
        """
        limit = self._patience.stall + (self._patience.silent if self._rank else 0.0)
        still: dict[int, float] = {}
        for rank, seen in self._progress.items():
            progress = self._keys.get(f"progress/{rank}")
            if progress is not None:  # else it has not come yet
                still[rank] = seen.unchanged(progress)
        slow = [rank for rank, seconds in still.items() if seconds > limit]
        if all(self._keys.get(f"left/{rank}") is not None for rank in slow) or self._keys.get("failure") is not None:
            return ""
        together = min(_TOGETHER * limit, limit - _TOGETHER_LOOKS * self._patience.period)
        ranks = [str(rank) for rank, seconds in still.items() if seconds > together]
        names = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(ranks)} have"
        return (
            f"{names} made no progress for {self._patience.stall / 60:g} minutes: see the log there, then go on with "
            "--resume, with more --timeout-minutes if that is what a batch takes"
        )

    def _is_deaf(self, peer: _Peer) -> bool:
        if any(self._keys.get(f"{sign}/{peer.rank}") is not None for sign in ("heard", "left")):
            return False
        return peer.process is None or not peer.process.is_local or peer.process.still_runs
