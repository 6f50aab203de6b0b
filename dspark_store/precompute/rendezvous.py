"""Where the ranks of a job meet: torchrun's store, a generation of it for each start, and the keys that they share.

torchrun starts all ranks again when one has failed and when nodes come or go. Its store lives on with all that earlier
ranks have put there, and nothing in the environment is new: the count of restarts is each node's own, and stays as it
is when nodes come or go. What holds is that no process of a start begins before all those of earlier ones have ended.

So rank 0 opens a generation, numbered by a counter, and the other ranks join the newest generation that a live rank 0
acknowledges. A rank that came before its rank 0 gets no answer in the generation of an earlier start, and sees the next
one open.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # not in __all__

RENDEZVOUS_GONE = "the rendezvous of the job is gone: the process that kept it has ended"
_TIMEOUT = timedelta(seconds=60)
_FIRST_POLL_SECONDS, _POLL_SECONDS = 0.002, 0.1
_JOIN_SECONDS = 600.0
_GENERATIONS = "dspark/generations"
_START = "start the job with torchrun"


class Keys:
    """Keys with texts, and counters, that ranks share in a store of torch; without one, those of a lone process.

    No call waits for a key to appear. RuntimeError, as torch raises it, once the process that keeps the store is gone.
    """

    def __init__(self, store: Store | None = None) -> None:
        self._store = HashStore() if store is None else store

    def get(self, key: str) -> str | None:
        """Return the text under a key, None when there is none."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    def set(self, key: str, text: str) -> None:
        """Put a text under a key, whatever was there."""
        self._store.set(key, text)

    def setdefault(self, key: str, text: str) -> str:
        """Put a text under a key that has none; return the text that the key has then. Of many calls, one is first."""
        return str(self._store.compare_set(key, "", text).decode())

    def add(self, key: str, count: int) -> int:
        """Add to a counter, which starts at 0; return the sum."""
        return int(self._store.add(key, count))

    def scoped(self, scope: str) -> Keys:
        """Return keys of a scope: two parts of one job that use the same names share nothing."""
        return Keys(PrefixStore(scope, self._store))


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """One rank's connection to the store, in the generation that ``prefix`` names."""

    store: TCPStore
    prefix: str

    @property
    def keys(self) -> Keys:
        """The keys of this generation."""
        return Keys(PrefixStore(self.prefix, self.store))

    def keys_for_thread(self) -> Keys:
        """Return the same keys over a connection of its own, which waits for no call of another thread."""
        return Keys(PrefixStore(self.prefix, _connect(self.store.host, self.store.port)))

    def group_store(self, timeout: timedelta | None = None) -> Store:
        """Return the store for `torch.distributed.init_process_group`; keys are waited for as long as ``timeout``."""
        store = PrefixStore(f"{self.prefix}/group", self.store)
        if timeout is not None:
            store.set_timeout(timeout)
        return store


def place_in_job() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, 0 and 1 without torchrun.

    ValueError when the environment describes half of a job.
    """
    size = whole_number("WORLD_SIZE", 1)
    if size < 1:
        raise ValueError(f"the environment's WORLD_SIZE is {size}, expected at least 1: {_START}")
    if size == 1:
        return 0, 1
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"WORLD_SIZE is {size} but {missing[0]} is not set: {_START}")
    rank = whole_number("RANK", 0)
    if not 0 <= rank < size:
        raise ValueError(f"the environment's RANK is {rank}, expected 0 to {size - 1}: {_START}")
    whole_number("MASTER_PORT", 0)
    return rank, size


def whole_number(name: str, default: int) -> int:
    """Return a number of the environment; ValueError when it is none."""
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"the environment's {name} is {text!r}, not a whole number: {_START}") from error


def meet(rank: int, size: int) -> Rendezvous:
    """Connect to the store that the environment names, which rank 0 keeps unless torchrun does; join a generation.

    TimeoutError when rank 0 does not come, RuntimeError when the store is gone.
    """
    kept_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = _connect(address, port, keep=rank == 0 and not kept_by_agent)
    number = join_generation(store) if rank else open_generation(_connect(address, port), size)
    return Rendezvous(store, f"dspark/{number}")


def _connect(address: str, port: int, *, keep: bool = False) -> TCPStore:
    return TCPStore(address, port, is_master=keep, timeout=_TIMEOUT, wait_for_workers=False)


def open_generation(store: Store, size: int) -> int:
    """Open a generation as its rank 0, and return its number. A thread acknowledges the other ``size - 1`` ranks.

    That thread has ``store`` to itself: a call of another thread that waits on the same connection may wait for a rank
    that waits to be acknowledged.
    """
    number = int(store.add(_GENERATIONS, 1))
    threading.Thread(target=_acknowledge, args=(store, number, size - 1), name="generation", daemon=True).start()
    return number


def join_generation(store: Store, seconds: float = _JOIN_SECONDS) -> int:
    """Return the number of the generation that this process's rank 0 has opened, once it has.

    TimeoutError when there is none within ``seconds``, RuntimeError when the store is gone.
    """
    try:
        return _join_until_acknowledged(store, seconds)
    except RuntimeError as error:
        raise RuntimeError(RENDEZVOUS_GONE) from error


def _join_until_acknowledged(store: Store, seconds: float) -> int:
    deadline, pause = time.monotonic() + seconds, _FIRST_POLL_SECONDS
    number = place = 0
    while not number or int(store.add(_acknowledged(number), 0)) < place:
        newest = int(store.add(_GENERATIONS, 0))
        if newest > number:
            number, place = newest, int(store.add(_joined(newest), 1))
            continue
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"rank 0 has not come within {seconds / 60:.0f} minutes: see its log, and start the job again"
            )
        time.sleep(pause)
        pause = min(2 * pause, _POLL_SECONDS)
    return number


def _acknowledge(store: Store, number: int, others: int) -> None:
    acknowledged, pause = 0, _FIRST_POLL_SECONDS
    try:
        while acknowledged < others:
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS)
            joined = int(store.add(_joined(number), 0))
            if joined > acknowledged:
                store.add(_acknowledged(number), joined - acknowledged)
                acknowledged, pause = joined, _FIRST_POLL_SECONDS
    except RuntimeError:  # the store is gone, and the job over: its watch says so
        return


def _joined(number: int) -> str:
    return f"dspark/{number}/joined"


def _acknowledged(number: int) -> str:
    return f"dspark/{number}/acknowledged"
