"""Who captures which shard: a board from which workers take the next one, with leases that can be lost.

A worker is a crew of ranks that run one batch together; its leader speaks for it. Nothing is dealt out in advance, so a
slow worker holds nobody up. A worker that shows no progress for the length of a lease loses its shard to one that has
nothing else to do. Whoever wants to commit a shard must claim it first, and only its holder can: so no two workers ever
put their objects in one place. A worker that hangs after its claim cannot be replaced, and ends the job.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dspark_store.precompute.keyvalue import KeyValue

_LOOKS_A_LEASE = 20


class LeaseError(RuntimeError):
    """A worker stopped in the midst of a commit, where nobody can take over."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """What a worker shows of itself.

    ``turn`` is new each time that it reaches for a shard, ``step`` each time that it shows anything. ``held`` is the
    position of the shard in hand; while it is ``reaching`` for one, nobody can tell yet which it will be.
    """

    turn: int = 0
    step: int = 0
    held: int | None = None
    reaching: bool = False

    def to_json(self) -> str:
        return json.dumps([self.turn, self.step, self.held, self.reaching])

    @classmethod
    def from_json(cls, text: str) -> _Shown:
        return cls(*json.loads(text))


@dataclass(frozen=True, slots=True)
class _Sight:
    """What was last seen of another worker, and since when it is the same."""

    shown: _Shown
    since: float


class ShardBoard:
    """One worker's view of the board.

    ``shards`` is the same list, in the same order, for every worker: the longest first, so that the last ones to end
    are short. ``lease_seconds`` of no progress lose a shard; each time that the same shard is lost, the lease on it
    doubles, so that a batch longer than a lease is computed in vain a few times and not for ever. ``clock`` gives
    seconds; only this worker's is ever read.

    Under ``owner/P`` stands who has the shard at position P: a worker's turn, and whether it holds the shard or commits
    it. No turn comes twice, so a slow hand never replaces an owner that it did not see.
    """

    def __init__(
        self,
        keys: KeyValue,
        shards: Sequence[int],
        worker: int,
        workers: int,
        lease_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = keys
        self._shards = shards
        self._worker = worker
        self._others = [other for other in range(workers) if other != worker]
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._shown = _Shown()
        self._sights: dict[int, _Sight] = {}
        self._next_look = float("-inf")

    @property
    def finished(self) -> bool:
        """Whether every shard of the list is committed."""
        return self._keys.add("done", 0) >= len(self._shards)

    def take(self) -> int | None:
        """Return a shard to capture; None when there is none now, though one may come back while not `finished`.

        LeaseError when a worker has hung in a commit for longer than a lease.
        """
        while self._keys.add("next", 0) < len(self._shards):
            self._reach()
            position = self._keys.add("next", 1) - 1
            if position < len(self._shards) and self._own(position, ""):
                return self._shards[position]
        if self._shown.reaching:
            self._let_go()
        return self._take_over()

    def progress(self) -> None:
        """Show that the shard in hand goes on."""
        self._show(held=self._shown.held)

    def claim(self) -> bool:
        """Ask for the right to commit the shard in hand; False when the lease was lost, and the shard with it."""
        position, turn = self._shown.held, self._shown.turn
        if position is None:
            return False
        self.progress()  # before it commits: who finds it committing can tell that it has just begun
        claimed = self._keys.swap(_owner_key(position), _holds(self._worker, turn), _commits(self._worker, turn))
        if not claimed:
            self._let_go()
        return claimed

    def done(self) -> None:
        """Tell that the shard in hand is committed."""
        self._keys.add("done", 1)
        self._let_go()

    def _take_over(self) -> int | None:
        """Return a shard that a silent worker has lost. Looks a few times a lease: idle workers may be many."""
        if self._clock() < self._next_look:
            return None
        self._next_look = self._clock() + self._lease_seconds / _LOOKS_A_LEASE
        for other in self._others:
            lost = self._lost_by(other)
            if lost is not None:
                position, owner = lost
                self._reach()
                if self._own(position, owner):
                    self._keys.add(_losses_key(position), 1)
                    self._next_look = float("-inf")
                    return self._shards[position]
                self._let_go()
        return None

    def _lost_by(self, other: int) -> tuple[int, str] | None:
        """Return the position that a worker has and has not worked on for the length of a lease, and its owner."""
        text = self._keys.get(f"worker/{other}")
        if text is None:
            return None
        shown, sight = _Shown.from_json(text), self._sights.get(other)
        if sight is None or sight.shown != shown:
            self._sights[other] = _Sight(shown, self._clock())
            return None
        silent = self._clock() - sight.since
        if silent < self._lease_seconds:
            return None
        for position in self._within_reach(shown):
            owner = self._keys.get(_owner_key(position)) or ""
            if owner == _commits(other, shown.turn):
                if self._keys.get(f"worker/{other}") != text:
                    return None
                raise LeaseError(
                    f"worker {other} has been committing shard {self._shards[position]} for {silent:.0f} s without an "
                    "end: look at its disk, then go on with --resume"
                )
            if owner not in ("", _holds(other, shown.turn)):
                continue
            losses = self._keys.add(_losses_key(position), 0)
            if silent >= self._lease_seconds * 2**losses:
                return position, owner
        return None

    def _within_reach(self, shown: _Shown) -> Sequence[int]:
        """Return the positions that a worker may have. One that stopped while it was reaching has any, or none."""
        if shown.reaching:
            return range(min(len(self._shards), self._keys.add("next", 0)))
        return () if shown.held is None else (shown.held,)

    def _reach(self) -> None:
        """Begin a turn, in the sight of all: should this worker stop before it shows what it holds, others search."""
        self._shown = _Shown(self._shown.turn + 1, self._shown.step)
        self._show(reaching=True)

    def _own(self, position: int, former: str) -> bool:
        owned = self._keys.swap(_owner_key(position), former, _holds(self._worker, self._shown.turn))
        if owned:
            self._show(held=position)
        return owned

    def _let_go(self) -> None:
        self._show(held=None)

    def _show(self, *, held: int | None = None, reaching: bool = False) -> None:
        self._shown = _Shown(self._shown.turn, self._shown.step + 1, held, reaching)
        self._keys.set(f"worker/{self._worker}", self._shown.to_json())


def _owner_key(position: int) -> str:
    return f"owner/{position}"


def _losses_key(position: int) -> str:
    return f"losses/{position}"


def _holds(worker: int, turn: int) -> str:
    return f"{worker} holds it in turn {turn}"


def _commits(worker: int, turn: int) -> str:
    return f"{worker} commits it in turn {turn}"


def longest_first(costs: dict[int, int]) -> list[int]:
    """Return shards by falling cost, equal ones in order."""
    return sorted(costs, key=lambda shard: (-costs[shard], shard))
