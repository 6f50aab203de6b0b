"""Which start of a job's ranks a process belongs to, where torchrun starts them more than once.

torchrun starts all ranks again when one has failed and when nodes come or go. Its store lives on with all that earlier
ranks have put there, and nothing in the environment is new: the count of restarts is each node's own, and stays as it
is when nodes come or go. What holds is that no process of a start begins before all those of earlier ones have ended.

So rank 0 opens a round, numbered by a counter, and another rank knocks at the newest one and waits for rank 0 to
answer, which it does only while it lives. A rank that has come first, and so has knocked at the round of an earlier
start, gets no answer there, and sees the next round open.
"""

from __future__ import annotations

import threading
import time

from torch.distributed import Store  # type: ignore[attr-defined]  # in C, not in __all__

_FIRST_POLL_SECONDS, _POLL_SECONDS = 0.002, 0.1
_JOIN_SECONDS = 600.0
_ROUNDS = "dspark/rounds"


def open_round(store: Store, size: int) -> int:
    """Open a round as its rank 0, and return its number. A thread answers the other ``size - 1`` ranks.

    That thread has ``store`` to itself: a call of another thread that waits on the same connection may wait for a rank
    that waits for an answer.
    """
    number = int(store.add(_ROUNDS, 1))
    threading.Thread(target=_answer, args=(store, number, size - 1), name="round", daemon=True).start()
    return number


def join_round(store: Store) -> int:
    """Return the number of the round that this process's rank 0 has opened, once it has.

    TimeoutError when there is none after ten minutes, RuntimeError when the store is gone.
    """
    try:
        return _knock_until_answered(store)
    except RuntimeError as error:
        raise RuntimeError("the rendezvous of the job is gone: the process that kept it has ended") from error


def _knock_until_answered(store: Store) -> int:
    deadline, pause = time.monotonic() + _JOIN_SECONDS, _FIRST_POLL_SECONDS
    number = knock = 0
    while not number or int(store.add(_answers(number), 0)) < knock:
        newest = int(store.add(_ROUNDS, 0))
        if newest > number:
            number, knock = newest, int(store.add(_knocks(newest), 1))
            continue
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"rank 0 has not come within {_JOIN_SECONDS / 60:.0f} minutes: see its log, and start the job again"
            )
        time.sleep(pause)
        pause = min(2 * pause, _POLL_SECONDS)
    return number


def _answer(store: Store, number: int, others: int) -> None:
    answered, pause = 0, _FIRST_POLL_SECONDS
    try:
        while answered < others:
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS)
            knocks = int(store.add(_knocks(number), 0))
            if knocks > answered:
                store.add(_answers(number), knocks - answered)
                answered, pause = knocks, _FIRST_POLL_SECONDS
    except RuntimeError:  # the store is gone, and the job over: its watch says so
        return


def _knocks(number: int) -> str:
    return f"dspark/{number}/knocks"


def _answers(number: int) -> str:
    return f"dspark/{number}/answers"
