"""Timing in turn."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.costs import decided, levelled, spread, time_in_turn


def test_every_action_runs_once_a_round():
    calls: list[str] = []

    def call(name):
        calls.append(name)
        return 1.0

    actions = {name: partial(call, name) for name in "abc"}
    times = time_in_turn(actions, 4)
    assert sorted(calls) == sorted("abc" * 4)
    assert all(len(found) == 4 for found in times.values())
    assert all(set(calls[at : at + 3]) == set("abc") for at in range(0, 12, 3))


def test_no_round_begins_when_time_is_up_but_three_there_are():
    assert len(time_in_turn({"a": lambda: 1.0}, 9, seconds=0)["a"]) == 3


def test_no_round_begins_when_enough_is_known():
    assert len(time_in_turn({"a": lambda: 1.0}, 9, until=lambda times: len(times["a"]) == 5)["a"]) == 5


def test_progress_counts_the_actions():
    done: list[tuple[int, int]] = []
    time_in_turn({"a": lambda: 1.0, "b": lambda: 1.0}, 2, progress=lambda *so_far: done.append(so_far))
    assert done == [(1, 4), (2, 4), (3, 4), (4, 4)]


@given(st.lists(st.floats(0.5, 9), min_size=3, max_size=7), st.lists(st.floats(1, 4), min_size=3, max_size=9))
def test_what_slows_a_whole_round_down_is_taken_out(own, rounds):
    times = {at: [seconds * slowness for slowness in rounds] for at, seconds in enumerate(own)}
    found = levelled(times)
    for at in range(len(own)):
        assert found[at].low == pytest.approx(found[at].high)
        assert found[at].median / found[0].median == pytest.approx(own[at] / own[0])


def test_a_comparison_is_decided_when_the_ratios_agree():
    first = [1.0, 2.0, 3.0, 1.5]
    assert decided({"a": first, "b": [2 * seconds for seconds in first]})
    assert not decided({"a": first, "b": [1.0, 1.0, 1.0, 1.0]})


def test_rates_turn_a_spread_around():
    rates = spread([1.0, 2.0, 4.0]).rates(8)
    assert (rates.low, rates.median, rates.high) == (8 / 3, 4, 8 / 1.5)
