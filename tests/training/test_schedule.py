import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.training.schedule import Schedule, warmup_steps


@pytest.mark.parametrize(("ratio", "total", "steps"), [(0.04, 100, 20), (0.04, 10000, 400), (0, 100, 1), (-1, 100, 1)])
def test_the_warm_up_is_a_share_of_the_steps_but_not_too_short(ratio, total, steps):
    assert warmup_steps(ratio, total) == steps


@pytest.mark.parametrize(("ratio", "steps"), [(0.01, 5), (0.5, 50)])
def test_another_least_warm_up_may_be_given(ratio, steps):
    assert warmup_steps(ratio, 100, least=5) == steps


def test_the_rate_rises_in_equal_steps_and_falls_along_a_cosine():
    schedule = Schedule(total=14, warmup=4, least=0.1)
    assert [schedule.multiplier(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert schedule.multiplier(9) == pytest.approx(0.55)
    assert schedule.multiplier(14) == pytest.approx(0.1)


@given(st.integers(1, 500), st.integers(1, 100), st.floats(0, 1))
def test_the_multiplier_stays_between_nothing_and_one_and_does_not_rise_again(total, warmup, least):
    schedule = Schedule(total, warmup, least)
    values = [schedule.multiplier(step) for step in range(total + 2)]
    assert all(0 < value <= 1 for value in values[:warmup])
    assert all(least - 1e-9 <= value <= 1 for value in values[warmup:])
    assert all(later <= value for value, later in zip(values[warmup:], values[warmup + 1 :], strict=False))
