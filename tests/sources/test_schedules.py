"""The numbers are those of Megatron-LM, run, and of hyper-parallel's formula."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.sources.schedules import exhaustive_schedule, local_indices, megatron_requests, weighted_schedule

megatron_schedule = partial(weighted_schedule, "megatron")
hyper_parallel_schedule = partial(weighted_schedule, "hyper_parallel")
WEIGHTED = [megatron_schedule, hyper_parallel_schedule]


def digits(values):
    return "".join(map(str, values.tolist()))


@pytest.mark.parametrize(
    ("weights", "megatron", "hyper_parallel"),
    [
        ((0.5, 0.25, 0.25), "0120012001", "0120012001"),
        ((0.7, 0.3), "0100100100", "0100010010"),
        ((0.3, 0.7), "1011011011", "1011011101"),
        ((30, 70), "1011011011", "1011011101"),
        ((0.9, 0.1), "0100000000", "0000010000"),
        ((1, 2, 3), "2102120212", "2102122102"),
    ],
)
def test_weighted_schedules_are_those_of_their_projects(weights, megatron, hyper_parallel):
    assert digits(megatron_schedule(weights, 10)) == megatron
    assert digits(hyper_parallel_schedule(weights, 10)) == hyper_parallel


@pytest.mark.parametrize(
    ("schedule", "local"), [(megatron_schedule, "0012134256"), (hyper_parallel_schedule, "0012134526")]
)
def test_every_part_is_taken_in_its_own_order(schedule, local):
    assert digits(local_indices(schedule((0.3, 0.7), 10))) == local


@pytest.mark.parametrize(
    ("lengths", "parts", "local"), [((3, 1, 2), "021020", "000112"), ((5, 2), "0100100", "0012134")]
)
def test_the_exhaustive_schedule_is_megatrons(lengths, parts, local):
    sequence = exhaustive_schedule(lengths)
    assert digits(sequence) == parts
    assert digits(local_indices(sequence)) == local


@pytest.mark.parametrize(("size", "requests"), [(1000, [302, 704]), (10, [4, 8]), (0, [0, 0])])
def test_megatron_rounds_what_it_builds_of_each_part_up(size, requests):
    assert megatron_requests((0.3, 0.7), size) == requests


lengths_of_parts = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(lengths_of_parts)
def test_an_exhaustive_schedule_takes_every_record_once_and_any_prefix_has_the_mixture(lengths):
    sequence = exhaustive_schedule(lengths)
    assert np.bincount(sequence, minlength=len(lengths)).tolist() == lengths
    shares = np.array(lengths) / sum(lengths)
    taken = np.cumsum(sequence[:, None] == np.arange(len(lengths)), axis=0)
    assert np.abs(taken - shares * np.arange(1, len(sequence) + 1)[:, None]).max() < 2


@given(lengths_of_parts, st.data())
def test_an_exhaustive_schedule_with_weights_follows_megatrons_until_a_part_ends(lengths, data):
    weights = data.draw(st.lists(st.floats(0.01, 1), min_size=len(lengths), max_size=len(lengths)))
    sequence = exhaustive_schedule(lengths, weights)
    assert np.bincount(sequence, minlength=len(lengths)).tolist() == lengths
    common = megatron_schedule(weights, sum(lengths), lengths)
    assert np.array_equal(sequence[: len(common)], common)


@pytest.mark.parametrize("schedule", WEIGHTED)
@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=3))
def test_prefixes_of_a_weighted_schedule_stay_near_their_shares(schedule, weights):
    sequence = schedule(weights, 400)
    shares = np.array(weights) / sum(weights)
    taken = np.cumsum(sequence[:, None] == np.arange(len(weights)), axis=0)
    bound = 1 if schedule is hyper_parallel_schedule else 1.5
    assert np.abs(taken - shares * np.arange(1, 401)[:, None]).max() < bound


@pytest.mark.parametrize("schedule", WEIGHTED)
def test_a_schedule_ends_before_a_part_is_asked_for_more_than_it_has(schedule):
    whole, cut = schedule((0.5, 0.5), 100), schedule((0.5, 0.5), 100, (2, 60))
    assert np.bincount(cut).tolist() == [2, 2]
    assert np.array_equal(cut, whole[:4])
    assert whole[4] == 0


def test_a_part_without_records_cannot_be_scheduled():
    with pytest.raises(ValueError, match="length 0"):
        exhaustive_schedule((3, 0))
