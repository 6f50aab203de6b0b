"""Seconds are counted once, whatever is timed inside what."""

import time

import pytest

from dspark_store.precompute.profile import Profile


@pytest.fixture
def pass_time(monkeypatch):
    """Let time pass only when told."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def go(seconds):
        now[0] += seconds

    return go


def test_blocks_of_one_kind_add_up(pass_time):
    profile = Profile()
    for seconds in (2, 3):
        with profile.timed("forward"):
            pass_time(seconds)
        pass_time(7)
    assert (profile.forward, profile.copy, profile.wait, profile.commit) == (5, 0, 0, 0)


def test_what_is_timed_inside_another_block_is_not_counted_twice(pass_time):
    profile = Profile()
    with profile.timed("commit"):
        pass_time(1)
        with profile.timed("wait"):
            pass_time(10)
            with profile.timed("copy"):
                pass_time(100)
        pass_time(2)
    assert (profile.commit, profile.wait, profile.copy) == (3, 10, 100)


def test_a_block_that_fails_is_counted(pass_time):
    profile = Profile()

    def fail():
        pass_time(4)
        raise KeyError

    with pytest.raises(KeyError), profile.timed("wait"):
        fail()
    assert profile.wait == 4


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


def test_a_job_that_took_no_time_has_shares_of_nothing():
    assert all("%" not in line or " 0.0%" in line for line in Profile().lines(0.0, 0, 0))
