"""One rank's view of the job: who it is among the others, and how they agree."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.precompute.peers import Patience
from dspark_store.precompute.rendezvous import Keys, Rendezvous, meet, place_in_job, whole_number
from dspark_store.precompute.watch import FAILED, StoppedError, Watch
from dspark_store.text import one_line

_LEAVING_SECONDS = 600.0
_FIRST_POLL_SECONDS, _POLL_SECONDS = 0.001, 0.2
_SETTLE_SECONDS = 0.3
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
"""What torchrun, Open MPI and Slurm's srun call the number of a process on its host; srun may start the others."""


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a job. Rank 0 holds the store's lock, makes the tokens and publishes; every rank captures.

    ``local_rank`` is its number among those of its host, None where nothing says so. ``keys`` is what they share,
    ``watch`` what tells them that one of them has failed, ``rendezvous`` the store with which process groups are made,
    None for a job of one process.
    """

    rank: int
    size: int
    local_rank: int | None
    keys: Keys
    watch: Watch
    rendezvous: Rendezvous | None = None

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def share[T: JsonValue](self, key: str, make: Callable[[], T]) -> T:
        """Make a value on rank 0, for all: the others `receive` it."""
        value = make()
        self.keys.set(key, json.dumps(value))
        return value

    def receive(self, key: str) -> JsonValue:
        """Wait for what rank 0 shares. Raises StoppedError when the job ends."""
        value: JsonValue = json.loads(self.wait_for(lambda: self.keys.get(key)))
        return value

    def wait_for[T](self, ready: Callable[[], T | None]) -> T:
        """Return the first answer that is not None. Raises StoppedError when the job ends."""
        pause = _FIRST_POLL_SECONDS
        while (answer := ready()) is None:
            self.watch.pause(pause)
            pause = min(2 * pause, _POLL_SECONDS)
        return answer

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Let an error that leaves the block end the job on every rank.

        Rank 0 stays in the block until the others have heard of it, so that they go on for no longer than they must
        while what is around the block is undone. Raises StoppedError in place of an error that another rank's failure
        came before, and so may have caused.
        """
        try:
            yield
        except BaseException as error:
            if self.size == 1:
                raise
            cause = _cause(error, self.watch)
            if self.leads:
                self.watch.let_others_hear()
            if cause is error:
                raise
            raise cause from error

    def scoped(self, scope: str) -> World:
        """Return the same world with keys of its own."""
        return replace(self, keys=self.keys.scoped(scope))


@contextmanager
def join_world(stall_seconds: float = float("inf")) -> Iterator[World]:
    """Join the job that torchrun has described in the environment; without torchrun, be a job of one process.

    An error that leaves the block ends the job on every rank; so does a rank that makes no progress for
    ``stall_seconds``: see `Watch.working`. ValueError when the environment describes half of a job.
    """
    rank, size = place_in_job()
    if size == 1:
        with Watch(0, 1, None) as watch:
            yield World(0, 1, 0, Keys(), watch)
        return
    rendezvous = meet(rank, size)
    with Watch(rank, size, rendezvous.keys_for_thread(), Patience(stall=stall_seconds)) as watch:
        world = World(rank, size, local_rank(), rendezvous.keys, watch, rendezvous)
        with world.failing_together():
            yield world
            leave_together(world)


def _cause(error: BaseException, watch: Watch) -> BaseException:
    """Tell the other ranks of an error; return it, or what has ended the job before and so may have caused it."""
    if isinstance(error, RuntimeError) or isinstance(error.__cause__, RuntimeError):
        time.sleep(_SETTLE_SECONDS)  # a peer whose connection broke is seen to be gone only a moment later
    cause = watch.fail(one_line(error))
    if not isinstance(error, Exception):
        return error
    try:
        watch.check()
    except StoppedError as reason:
        return reason
    return StoppedError(cause, FAILED) if cause else error


def leave_together(world: World, seconds: float = _LEAVING_SECONDS) -> None:
    """End only when every rank has come here, rank 0 last: the store may live in its process.

    StoppedError when one has not within ``seconds``.
    """
    others, deadline = world.size - 1, time.monotonic() + seconds
    world.keys.add("ended", 1)

    def all_ended() -> bool | None:
        if time.monotonic() > deadline:
            raise StoppedError(f"the job is done, but a rank has not ended within {seconds:.0f} s", FAILED)
        return world.keys.add("ended", 0) > others or None

    world.wait_for(all_ended)
    if world.leads:
        with contextlib.suppress(StoppedError):  # all is done, whatever becomes of the others now
            world.wait_for(lambda: world.keys.add("leaving", 0) == others or None)
    else:
        world.keys.add("leaving", 1)


def local_rank() -> int | None:
    """Return this process's number on its host, None where nothing in the environment says it."""
    known = [name for name in _LOCAL_RANKS if name in os.environ]
    return whole_number(known[0], 0) if known else None
