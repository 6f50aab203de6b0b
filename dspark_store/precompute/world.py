"""One rank's view of the job: who it is among the others, and how they agree."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.precompute.board import LeaseError
from dspark_store.precompute.keyvalue import KeyValue, LocalKeys, ScopedKeys, SharedStore
from dspark_store.precompute.watch import FAILED, StoppedError, Watch
from dspark_store.writers.lock import LostLockError

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
    keys: KeyValue
    watch: Watch
    rendezvous: SharedStore | None = None

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
    def failure_told(self) -> Iterator[None]:
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
            why = _cause(error, self.watch)
            if self.leads:
                self.watch.let_others_hear()
            if why is error:
                raise
            raise why from error

    def scoped(self, scope: str) -> World:
        """Return the same world with keys of its own."""
        return World(self.rank, self.size, self.local_rank, ScopedKeys(self.keys, scope), self.watch, self.rendezvous)


@contextmanager
def join_world() -> Iterator[World]:
    """Join the job that torchrun has described in the environment; without torchrun, be a job of one process.

    An error that leaves the block ends the job on every rank. ValueError when the environment describes half of a job.
    """
    size = _whole("WORLD_SIZE", 1)
    if size < 1:
        raise ValueError(f"the environment's WORLD_SIZE is {size}, expected at least 1: start the job with torchrun")
    if size == 1:
        with Watch(0, 1, None) as watch:
            yield World(0, 1, 0, LocalKeys(), watch)
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"WORLD_SIZE is {size} but {missing[0]} is not set: start the job with torchrun")
    rank = _whole("RANK", 0)
    if not 0 <= rank < size:
        raise ValueError(f"the environment's RANK is {rank}, expected 0 to {size - 1}: start the job with torchrun")
    _whole("MASTER_PORT", 0)
    store = SharedStore.connect(rank, size)
    with Watch(rank, size, store.again()) as watch:
        world = World(rank, size, _local_rank(), store, watch, store)
        with world.failure_told():
            yield world
            _leave_together(world)


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


def one_line(error: BaseException) -> str:
    """Return an error's message in one line; the name of its kind where it has none, or is nobody's mistake."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    text = " ".join(str(error).split())
    foreseen = isinstance(error, ValueError | OSError | ImportError | StoppedError | LostLockError | LeaseError)
    return text if foreseen and text else f"{type(error).__name__}: {text or 'no reason given'}"


def _leave_together(world: World) -> None:
    """End only when every rank has come here, rank 0 last: the store may live in its process."""
    others, deadline = world.size - 1, time.monotonic() + _LEAVING_SECONDS
    world.keys.add("ended", 1)

    def all_ended() -> bool | None:
        if time.monotonic() > deadline:
            raise StoppedError(f"the job is done, but a rank has not ended within {_LEAVING_SECONDS:.0f} s", FAILED)
        return world.keys.add("ended", 0) > others or None

    world.wait_for(all_ended)
    if world.leads:
        with contextlib.suppress(StoppedError):  # all is done, whatever becomes of the others now
            world.wait_for(lambda: world.keys.add("leaving", 0) == others or None)
    else:
        world.keys.add("leaving", 1)


def _local_rank() -> int | None:
    known = [name for name in _LOCAL_RANKS if name in os.environ]
    return _whole(known[0], 0) if known else None


def _whole(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(
            f"the environment's {name} is {text!r}, not a whole number: start the job with torchrun"
        ) from error
