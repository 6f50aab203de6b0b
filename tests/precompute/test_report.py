"""What a capture counts on all ranks, and tells while it runs and at its end."""

import threading
import time
from dataclasses import replace

import pytest

from dspark_store.precompute.ranks import World
from dspark_store.precompute.rendezvous import Keys
from dspark_store.precompute.report import CaptureCounts, Profile
from dspark_store.precompute.watch import Watch
from dspark_store.progress import Unseen, progress_shown_by
from tests.writers.small_store import LENGTHS, small_record

SHARDS = (1, 2)  # rows 4 to 9: 45 of 81 tokens


class Noted(Unseen):
    """Progress that keeps what it is given."""

    def __init__(self, what, total, unit, done):
        self.begun = (what, total, unit, done)
        self.reached: list[tuple[int, str]] = []

    def reach(self, units, note):
        self.reached.append((units, note()))


@pytest.fixture
def shown():
    """All progress that is shown."""
    bars: list[Noted] = []

    def show(*begun):
        bars.append(Noted(*begun))
        return bars[-1]

    with progress_shown_by(show):
        yield bars


@pytest.fixture
def count():
    """Make the counts of two ranks, of which rank 0 shows."""
    keys = Keys()
    record = small_record()
    record = replace(record, schema=record.schema.settled(len(LENGTHS)))
    with Watch(0, 1, None) as watch:
        worlds = [World(rank, 2, rank, keys, watch) for rank in range(2)]
        yield lambda: [CaptureCounts(world, record, SHARDS, LENGTHS if world.leads else ()) for world in worlds]


def test_a_report_is_of_all_ranks(count):
    leader, follower = count()
    with leader, follower:
        leader.batch(25)
        follower.batch(20)
        leader.committed(10, 1000)
        follower.committed(5, 500)
    report = leader.report(9.0)
    assert (report.shards, report.tokens, report.stored_bytes, report.tokens_per_second) == (2, 45, 1500, 5.0)
    assert leader.report(0.0).tokens_per_second == 0


def test_rank_0_alone_shows_what_all_have_done_on_top_of_what_was_done_before(count, shown):
    leader, follower = count()
    with leader, follower:
        leader.batch(25)
        follower.batch(20)
    (bar,) = shown
    assert bar.begun == ("capture", 81, "tokens", 36)
    assert [units for units, _ in bar.reached] == [36 + 25, 36 + 45]


def test_rank_0_waits_until_all_shards_are_committed_and_shows_what_others_do(count, shown):
    leader, follower = count()
    with leader:
        follower.batch(45)
        follower.committed(45, 1)
        late = threading.Timer(0.05, follower.committed, (0, 1))
        late.start()
        leader.wait_for_all(2)
        assert leader.report(1.0).shards == 2
    assert shown[0].reached[0][0] == 81


def test_a_note_tells_the_size_to_come(count, shown):
    leader, _ = count()
    with leader:
        leader.batch(24)  # not committed yet: nobody knows what they take
        leader.committed(24, 24_000)
        leader.batch(10)
    notes = [note for _, note in shown[0].reached]
    assert notes[0].endswith("of states expected")
    assert notes[1].endswith("/s written, about 45.00 KB of states in all")


@pytest.fixture
def pass_time(monkeypatch):
    """Let time pass only when told."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def go(seconds):
        now[0] += seconds

    return go


def test_blocks_of_one_kind_add_up_also_one_that_fails_and_one_inside_another_is_not_counted_twice(pass_time):
    profile = Profile()

    def fail():
        pass_time(2)
        raise KeyError

    with profile.timed("commit"):
        pass_time(1)
        with profile.timed("wait"):
            pass_time(10)
            with profile.timed("copy"):
                pass_time(100)
    pass_time(7)
    with pytest.raises(KeyError), profile.timed("commit"):
        fail()
    assert (profile.forward, profile.commit, profile.wait, profile.copy) == (0, 3, 10, 100)


def test_the_shares_are_of_the_whole_and_threads_stand_beside_it():
    lines = list(Profile(forward=6, copy=1, wait=1, commit=1).lines(10.0, encode=8, write=2))
    assert [line.split()[1:5] for line in lines[:5]] == [
        ["forward", "6.00", "s", "60.0%"],
        ["copy", "1.00", "s", "10.0%"],
        ["waiting", "1.00", "s", "10.0%"],
        ["commit", "1.00", "s", "10.0%"],
        ["rest", "1.00", "s", "10.0%"],
    ]
    assert [line.split()[1:4] for line in lines[5:]] == [["encode", "8.00", "s"], ["write", "2.00", "s"]]
    assert all("%" not in line or " 0.0%" in line for line in Profile().lines(0.0, 0, 0))
