"""From costs to a setting: properties of the prediction and of the choice."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.measure import Setting
from benchmarks.recommend import (
    SIZE_TOLERANCE,
    TOLERANCE,
    Candidate,
    Known,
    RandomReads,
    ReadCost,
    StorePlan,
    candidates,
    choose,
    opened_share,
    predict,
)

positive = st.floats(1e-3, 1e3)
shares = st.floats(0, 1)
costs = st.builds(ReadCost, positive, positive, positive, positive)
workloads = st.builds(RandomReads, positive, positive, positive, shares, positive)
settings = st.builds(Setting, st.sampled_from(["none", "fast", "default"]), st.integers(1, 9), st.integers(1, 9))
choices = st.lists(
    st.builds(Candidate, settings, st.floats(1, 2), st.floats(1, 1.05), st.integers(1, 5)),
    min_size=1,
    max_size=12,
    unique_by=lambda one: one.setting,
)


@given(costs, workloads)
def test_neither_storage_nor_cores_are_outrun(cost, workload):
    found = predict(cost, workload)
    seconds = workload.batch_bytes / found.rate
    assert seconds >= max(found.line_seconds, found.work_seconds) * (1 - 1e-9)
    assert seconds <= (found.line_seconds + found.work_seconds) * (1 + 1e-9)


@given(costs, workloads, st.floats(1, 10))
def test_faster_storage_and_more_cores_never_slow_a_reader_down(cost, workload, factor):
    rate = predict(cost, workload).rate * (1 - 1e-9)
    assert predict(cost, replace(workload, storage_rate=workload.storage_rate * factor)).rate >= rate
    assert predict(cost, replace(workload, cores=workload.cores * factor)).rate >= rate


@given(costs, workloads)
def test_unlimited_storage_leaves_the_cores(cost, workload):
    found = predict(cost, replace(workload, storage_rate=float("inf"), opened=0))
    assert found.rate == pytest.approx(workload.cores / cost.work)


@given(costs, workloads)
def test_opening_objects_costs(cost, workload):
    assert predict(cost, replace(workload, opened=1)).rate < predict(cost, replace(workload, opened=0)).rate


@given(st.integers(1, 10**6), st.integers(1, 512), st.integers(1, 8))
def test_objects_that_fit_stay_open_and_more_do_not(samples, shard_size, layers):
    share = opened_share(samples, shard_size, layers)
    objects = -(-samples // shard_size) * layers
    assert (share == 0) == (objects <= 256)
    assert 0 <= share < 1
    assert opened_share(samples * 2, shard_size, layers) >= share


@given(choices)
def test_the_choice_is_as_fast_as_the_best_and_nothing_as_fast_is_smaller(among):
    best, chosen = max(one.rate for one in among), choose(among)
    assert chosen.rate >= (1 - TOLERANCE) * best
    fast = [one for one in among if one.rate >= (1 - TOLERANCE) * best]
    assert chosen.stored <= (1 + SIZE_TOLERANCE) * min(one.stored for one in fast)


@given(choices, st.randoms())
def test_the_choice_does_not_depend_on_the_order(among, shuffle):
    chosen = choose(among)
    shuffle.shuffle(among)
    assert choose(among) == chosen


@given(choices)
def test_slower_and_larger_settings_change_nothing(among):
    chosen = choose(among)
    worse = Candidate(Setting("dense", 10, 10), chosen.rate / 2, 9.0, 1)
    assert choose([*among, worse]) == chosen


def test_of_equal_sizes_the_one_of_fewer_objects_is_taken():
    few, many = (Candidate(Setting("default", 64, rows), 1.0, 0.7, 1 / rows) for rows in (256, 16))
    assert choose([many, few]) == few


def test_there_must_be_something_to_choose_from():
    with pytest.raises(ValueError, match="no setting"):
        choose([])


@given(st.dictionaries(settings, st.builds(Known, costs, positive), min_size=1), positive)
def test_every_setting_is_predicted_and_a_correction_multiplies_its_rate(known, factor):
    assume(factor > 0)
    plan = StorePlan(1000, 3, 1e3, 8, 1e6)
    plain = {one.setting: one for one in candidates(known, plan)}
    corrected = candidates({setting: replace(found, correction=factor) for setting, found in known.items()}, plan)
    assert plain.keys() == known.keys()
    for one in corrected:
        assert one.rate == pytest.approx(plain[one.setting].rate * factor)


def test_slow_storage_wants_small_stores_and_fast_storage_quick_ones():
    known = {
        Setting("default", 256, 16): Known(ReadCost(work=1.0, line=0.5, open_seconds=0, open_bytes=0), 0.5),
        Setting("none", 256, 16): Known(ReadCost(work=0.1, line=1.0, open_seconds=0, open_bytes=0), 1.0),
    }
    slow, fast = (choose(candidates(known, StorePlan(16, 1, 1.0, 8, rate))).setting.codec for rate in (0.1, 100.0))
    assert (slow, fast) == ("default", "none")


def test_a_large_store_wants_small_indices_and_a_small_one_few_objects():
    known = {
        Setting("default", 64, rows): Known(ReadCost(1.0, 1.0, open_seconds=rows / 8, open_bytes=rows / 8), 1.0)
        for rows in (16, 256)
    }
    plan = StorePlan(10**6, 5, 100.0, 8, 1.0)
    assert choose(candidates(known, plan)).setting.shard_size == 16
    assert choose(candidates(known, replace(plan, samples=256))).setting.shard_size == 256
