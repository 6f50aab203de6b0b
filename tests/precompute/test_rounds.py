"""Ranks of one start find one another in a store that has seen others, whoever comes first."""

import datetime as dt
import threading
import time

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # in C, not in __all__

from dspark_store.precompute import rounds
from dspark_store.precompute.rounds import join_round, open_round


@pytest.fixture
def connect():
    """Keep torch's store in this process; return what connects to it."""
    timeout = dt.timedelta(seconds=20)
    kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    return lambda: TCPStore("127.0.0.1", kept.port, is_master=False, wait_for_workers=False, timeout=timeout)


class Rank:
    """A rank that joins a round in a thread."""

    def __init__(self, store):
        self.joined: list[int] = []
        self._thread = threading.Thread(target=lambda: self.joined.append(join_round(store)))
        self._thread.start()

    def round(self):
        self._thread.join(20)
        return self.joined[0]


def begin_and_die(store):
    """Do what a rank 0 does that is killed as soon as it has opened its round."""
    store.add(rounds._ROUNDS, 1)


def test_ranks_that_come_before_and_after_rank_0_are_in_its_round(connect):
    early = [Rank(connect()) for _ in range(2)]
    time.sleep(0.02)
    number = open_round(connect(), 4)
    assert [rank.round() for rank in (*early, Rank(connect()))] == [number] * 3
    assert not _waits_for_anybody()


def test_a_rank_does_not_stay_in_the_round_of_an_earlier_start(connect):
    begin_and_die(connect())
    early = Rank(connect())
    time.sleep(0.1)
    assert early.joined == []
    begin_and_die(connect())
    time.sleep(0.1)
    assert early.joined == []
    assert (open_round(connect(), 3), early.round(), join_round(connect())) == (3, 3, 3)


def test_an_earlier_start_that_was_complete_answers_nobody(connect):
    assert (open_round(connect(), 2), join_round(connect())) == (1, 1)
    early = Rank(connect())
    time.sleep(0.1)
    assert early.joined == []
    assert (open_round(connect(), 2), early.round()) == (2, 2)


def test_a_rank_0_that_does_not_come_is_not_waited_for_for_ever(connect, monkeypatch):
    monkeypatch.setattr(rounds, "_JOIN_SECONDS", 0.05)
    begin_and_die(connect())
    with pytest.raises(TimeoutError, match="rank 0 has not come within 0 minutes: see its log"):
        join_round(connect())


def _waits_for_anybody():
    deadline = time.monotonic() + 10
    while any(thread.name == "round" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return any(thread.name == "round" for thread in threading.enumerate())
