"""The Pareto front of size and speed."""

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.plots import pareto_front

points = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=20)


def front_of(choices):
    return pareto_front([size for size, _ in choices], [speed for _, speed in choices])


@given(points)
def test_nothing_on_the_front_is_beaten_and_everything_else_is(choices):
    front = front_of(choices)
    for at, (size, speed) in enumerate(choices):
        better = [
            other
            for other, (s, v) in enumerate(choices)
            if s <= size and v >= speed and ((s, v) != (size, speed) or other < at)
        ]
        assert (at in front) == (not better)


@given(points)
def test_the_front_goes_from_small_and_slow_to_large_and_fast(choices):
    found = [choices[at] for at in front_of(choices)]
    assert found == sorted(set(found))
    assert [speed for _, speed in found] == sorted(speed for _, speed in found)


@given(points, st.integers(1, 5))
def test_the_front_does_not_depend_on_units(choices, factor):
    front = pareto_front([size * factor for size, _ in choices], [speed / 2 for _, speed in choices])
    assert front == front_of(choices)
