"""Ranks of one start find one another in a store that has seen others, whoever comes first, and share its keys."""

import datetime as dt
import threading
import time

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # in C, not in __all__

from dspark_store.precompute.rendezvous import Keys, Rendezvous, join_generation, meet, open_generation

TIMEOUT = dt.timedelta(seconds=60)
LIMIT = 60


@pytest.fixture
def kept():
    """Keep torch's store in this process, on a free port."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


@pytest.fixture
def connect(kept):
    """Connect once more to that store."""
    return lambda: TCPStore("127.0.0.1", kept.port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)


@pytest.fixture(params=["local", "shared"])
def keys(request):
    if request.param == "local":
        return Keys().scoped("part")
    return Rendezvous(request.getfixturevalue("kept"), "dspark/1").keys


def test_what_was_put_is_got_and_nothing_is_waited_for(keys):
    for text in ("one", "zwölf ✓", "", "0123456789" * 50_000):
        keys.set("a/b", text)
        assert keys.get("a/b") == text
    assert keys.get("nothing") is None
    assert [keys.add("n", count) for count in (0, 2, 3, 0)] == [0, 2, 5, 5]
    assert (keys.setdefault("a", "first"), keys.setdefault("a", "second"), keys.get("a")) == ("first",) * 3


def test_two_scopes_are_apart(keys):
    one, other = keys.scoped("one"), keys.scoped("other")
    one.set("a", "x")
    one.add("n", 1)
    assert (other.get("a"), other.add("n", 0), other.setdefault("a", "y")) == (None, 0, "y")


def in_threads(calls):
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_connection_serves_two_threads(keys):
    in_threads([lambda: [keys.add("n", 1) for _ in range(200)]] * 2)
    assert keys.add("n", 0) == 400


def test_groups_are_made_in_a_part_of_their_own(kept):
    rendezvous = Rendezvous(kept, "dspark/1")
    rendezvous.group_store(dt.timedelta(seconds=5)).set("a", "x")
    assert rendezvous.keys.get("a") is None
    assert rendezvous.keys.get("group/a") == "x"


class Rank:
    """A rank that joins a generation in a thread."""

    def __init__(self, store):
        self.joined: list[int] = []
        self._thread = threading.Thread(target=lambda: self.joined.append(join_generation(store)))
        self._thread.start()

    def generation(self):
        self._thread.join(LIMIT)
        return self.joined[0]


def begin_and_die(store):
    """Do what a rank 0 does that is killed as soon as it has opened its generation."""
    store.add("dspark/generations", 1)


def wait_for_a_rank(store, number):
    """Wait until a rank has tried to join a generation."""
    deadline = time.monotonic() + LIMIT
    while not store.add(f"dspark/{number}/joined", 0):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_ranks_that_come_before_and_after_rank_0_are_in_its_generation(connect):
    early = [Rank(connect()) for _ in range(2)]
    number = open_generation(connect(), 4)
    assert [rank.generation() for rank in (*early, Rank(connect()))] == [number] * 3
    for thread in threading.enumerate():
        if thread.name == "generation":
            thread.join(LIMIT)
            assert not thread.is_alive()


@pytest.mark.parametrize("complete", [False, True])
def test_a_rank_does_not_stay_in_the_generation_of_an_earlier_start(connect, complete):
    if complete:
        assert (open_generation(connect(), 2), join_generation(connect())) == (1, 1)
    else:
        begin_and_die(connect())
    early = Rank(connect())
    wait_for_a_rank(connect(), 1)
    begin_and_die(connect())
    wait_for_a_rank(connect(), 2)
    assert early.joined == []
    assert (open_generation(connect(), 3), early.generation(), join_generation(connect())) == (3, 3, 3)


def test_a_rank_0_that_does_not_come_is_not_waited_for_for_ever(connect):
    begin_and_die(connect())
    with pytest.raises(TimeoutError, match="rank 0 has not come within 0 minutes: see its log"):
        join_generation(connect(), seconds=0.05)


def test_ranks_that_torchrun_starts_again_share_a_store_and_none_of_the_old_keys(kept, monkeypatch):
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(kept.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**settings, "TORCHELASTIC_RESTART_COUNT": "0"}.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        leader, follower = meet(0, 2), meet(1, 2)
        assert (leader.keys.get("failure"), follower.keys.add("next", 0)) == (None, 0)
        leader.keys.set("failure", "x")
        leader.keys.add("next", 3)
        assert (follower.keys_for_thread().get("failure"), follower.keys.add("next", 0)) == ("x", 3)
