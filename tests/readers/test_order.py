"""Orders, batches, resume points, admission and splits: properties of the arithmetic, and lists that pin it."""

import hashlib
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.readers.order import (
    BatchPlan,
    EndRule,
    LoaderState,
    ShardWindow,
    admitted,
    epoch_order,
    split_mask,
)

words = st.integers(0, 2**64 - 1)
end_rules: st.SearchStrategy[EndRule] = st.sampled_from(["drop", "short", "even", "repeat"])
windows = st.builds(ShardWindow, st.integers(1, 9), st.integers(1, 5))
sample_sets = st.sets(st.integers(0, 200), max_size=80).map(sorted)
plans = st.builds(BatchPlan, st.integers(0, 120), st.integers(1, 6), st.integers(1, 7), end_rules)


def splitmix(seed: int, number: int) -> int:
    """The output `number` (0 first) of SplitMix64, in plain integers."""
    word = (seed + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


def fold(*words: int) -> int:
    state = 0
    for word in words:
        state = splitmix(state ^ word, 0)
    return state


def by_key(items, tag: int, seed: int, epoch: int) -> list[int]:
    start = fold(tag, seed, epoch)
    return sorted(items, key=lambda item: (splitmix(start, item) >> 32, item))


@pytest.mark.parametrize(
    ("seed", "epoch", "order", "in_windows"),
    [
        (
            0,
            1,
            [6, 2, 3, 12, 1, 7, 0, 9, 10, 5, 4, 15, 11, 8, 13, 14],
            [2, 3, 1, 0, 5, 4, 9, 10, 15, 11, 6, 12, 7, 8, 13, 14],
        ),
        (
            2**64 - 1,
            7,
            [9, 6, 2, 3, 13, 0, 8, 11, 15, 1, 7, 10, 14, 4, 12, 5],
            [2, 0, 15, 1, 6, 13, 8, 7, 14, 12, 9, 3, 11, 10, 4, 5],
        ),
    ],
)
def test_orders_are_these(seed, epoch, order, in_windows) -> None:
    assert epoch_order(16, seed=seed, epoch=epoch).tolist() == order
    assert epoch_order(16, seed=seed, epoch=epoch, window=ShardWindow(3, 2)).tolist() == in_windows


@pytest.mark.parametrize(
    ("window", "digest"),
    [
        (None, "52905354b3fab7cab3bdf5a4893b5f4fcfc63a3acc5a1d867d835629612319d7"),
        (ShardWindow(512, 8), "57f6ebded53d30fe18a6b789daf6cf2f4af4cb9e839091907c95416459b2b460"),
    ],
)
def test_a_long_order_has_this_digest(window, digest) -> None:
    order = epoch_order(100_000, seed=42, epoch=3, window=window)
    assert order.dtype == np.int64
    assert hashlib.sha256(order.astype("<i8").tobytes()).hexdigest() == digest


def test_the_generator_is_the_published_splitmix64() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [splitmix(1234567, number) for number in range(3)] == published


@given(sample_sets, words, words)
def test_the_global_order_follows_its_specification(samples, seed, epoch) -> None:
    order = epoch_order(np.array(samples, np.int64), seed=seed, epoch=epoch)
    assert order.tolist() == by_key(samples, 1, seed, epoch)


@given(sample_sets, words, words, windows)
def test_the_window_order_follows_its_specification(samples, seed, epoch, window) -> None:
    shards = by_key({sample // window.shard_size for sample in samples}, 2, seed, epoch)
    expected = []
    for first in range(0, len(shards), window.shards):
        members = shards[first : first + window.shards]
        expected += by_key([sample for sample in samples if sample // window.shard_size in members], 1, seed, epoch)
    assert epoch_order(np.array(samples, np.int64), seed=seed, epoch=epoch, window=window).tolist() == expected


@given(sample_sets.filter(len), words, st.data())
def test_leaving_a_sample_out_does_not_move_the_others(samples, seed, data) -> None:
    left_out = data.draw(st.sampled_from(samples))
    rest = np.array([sample for sample in samples if sample != left_out], np.int64)
    order = epoch_order(np.array(samples), seed=seed, epoch=0)
    assert epoch_order(rest, seed=seed, epoch=0).tolist() == order[order != left_out].tolist()


@given(sample_sets, words, st.one_of(st.none(), windows), st.randoms())
def test_the_order_in_which_samples_are_given_does_not_matter(samples, seed, window, random) -> None:
    mixed = random.sample(samples, len(samples))
    one, other = (
        epoch_order(np.array(given, np.int32), seed=seed, epoch=2, window=window) for given in (samples, mixed)
    )
    assert one.tolist() == other.tolist()


@given(words, words, words, st.one_of(st.none(), st.just(ShardWindow(16, 4))))
def test_two_epochs_and_two_seeds_have_different_orders(seed, first, second, window) -> None:
    one = epoch_order(256, seed=seed, epoch=first, window=window).tolist()
    assert (one == epoch_order(256, seed=seed, epoch=second, window=window).tolist()) == (first == second)
    assert (one == epoch_order(256, seed=second, epoch=first, window=window).tolist()) == (seed == second)


def test_the_order_is_ascending_without_shuffle() -> None:
    assert epoch_order(np.array([7, 2, 5]), seed=3, epoch=1, shuffle=False).tolist() == [2, 5, 7]


def test_a_million_samples_are_drawn_in_no_time() -> None:
    def processor_seconds() -> float:
        start = time.process_time()
        epoch_order(1_000_000, seed=0, epoch=0, window=ShardWindow(250, 16))
        return time.process_time() - start

    assert min(processor_seconds() for _ in range(3)) < 0.3


@pytest.mark.parametrize("samples", [-1, np.array([3, -1]), np.array([2**32]), np.zeros((2, 2), int), np.zeros(2)])
def test_what_is_no_list_of_samples_is_refused(samples) -> None:
    with pytest.raises(ValueError, match="samples"):
        epoch_order(samples, seed=0, epoch=0)


def test_a_seed_or_epoch_outside_64_bits_is_refused() -> None:
    for seed, epoch in ((-1, 0), (0, -1), (2**64, 0)):
        with pytest.raises(ValueError, match=r"between 0 and 2\^64 - 1"):
            epoch_order(4, seed=seed, epoch=epoch)


def positions_of(plan: BatchPlan, step: int) -> list[int]:
    return [int(position) for rank in range(plan.dp_size) for position in plan.positions(step, rank)]


@given(plans)
def test_an_epoch_covers_every_item_once_over_all_ranks(plan) -> None:
    seen = Counter(position for step in range(plan.steps) for position in positions_of(plan, step))
    assert set(seen) == set(range(plan.count - plan.dropped))
    assert seen.total() == plan.count - plan.dropped + plan.repeated
    if plan.last not in ("even", "repeat"):
        assert set(seen.values()) <= {1}


@given(plans)
def test_only_the_rule_for_the_end_leaves_out_or_repeats(plan) -> None:
    assert plan.dropped == (plan.count % plan.global_batch if plan.last == "drop" else 0)
    whole = {"even": plan.dp_size, "repeat": plan.global_batch}.get(plan.last, 1)
    assert plan.repeated == -plan.count % whole


@given(plans)
def test_every_batch_is_full_but_the_last_short_one(plan) -> None:
    for step in range(plan.steps):
        sizes = [plan.positions(step, rank).size for rank in range(plan.dp_size)]
        if plan.last in ("short", "even") and step == plan.steps - 1:
            assert max(sizes) - min(sizes) <= (plan.last == "short")
            assert max(sizes) <= plan.batch_size
        else:
            assert sizes == [plan.batch_size] * plan.dp_size


@given(st.sets(st.integers(0, 300), min_size=1).map(sorted), words, st.one_of(st.none(), windows), plans)
def test_ranks_share_an_epochs_samples_without_overlap(samples, seed, window, plan) -> None:
    order = epoch_order(np.array(samples), seed=seed, epoch=0, window=window)
    plan = BatchPlan(len(samples), plan.batch_size, plan.dp_size, "short")
    given_out = [int(order[position]) for step in range(plan.steps) for position in positions_of(plan, step)]
    assert sorted(given_out) == samples


@given(st.integers(0, 120), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), end_rules, st.data())
def test_a_resume_under_another_world_size_goes_on_with_the_same_stream(count, unit, one, other, last, data) -> None:
    before, after = BatchPlan(count, unit * one, other, last), BatchPlan(count, unit * other, one, last)
    stopped = data.draw(st.integers(0, before.steps))
    state = LoaderState.after(before, epoch=4, steps=stopped)
    if last == "even":  # how much is repeated depends on the ranks, so the last batch is not compared
        count -= count % (unit * one * other)
        before, after = replace(before, count=count), replace(after, count=count)
        state = LoaderState.after(before, epoch=4, steps=min(stopped, before.steps))
        stopped = min(stopped, before.steps)
    whole = [positions_of(before, step) for step in range(before.steps)]
    resumed = [positions_of(after, step) for step in range(state.steps_done(after), after.steps)]
    assert whole[:stopped] + resumed == whole


@pytest.mark.parametrize(
    ("plan", "step", "positions", "repeated"),
    [
        (BatchPlan(13, 2, 4, "short"), 1, [[8], [9], [10], [11, 12]], 0),
        (BatchPlan(9, 2, 4, "short"), 1, [[], [], [], [8]], 0),
        (BatchPlan(9, 2, 2, "even"), 2, [[8], [0]], 1),
        (BatchPlan(3, 4, 2, "repeat"), 0, [[0, 1, 2, 0], [1, 2, 0, 1]], 5),
    ],
)
def test_the_last_batch_falls_to_the_ranks_by_its_rule(plan, step, positions, repeated) -> None:
    assert [plan.positions(step, rank).tolist() for rank in range(plan.dp_size)] == positions
    assert plan.repeated == repeated


@pytest.mark.parametrize(
    ("saved", "other", "message"),
    [
        (BatchPlan(40, 2, 4, "drop"), BatchPlan(40, 2, 3, "drop"), r"of 8, this loader has 6 \(2 x 3 ranks\)"),
        (BatchPlan(42, 2, 4, "short"), BatchPlan(41, 2, 4, "short"), "epoch of 42 items, this loader's has 41"),
        (BatchPlan(42, 2, 4, "short"), BatchPlan(42, 2, 4, "drop"), "another end rule"),
    ],
)
def test_a_state_is_refused_under_another_plan(saved, other, message) -> None:
    with pytest.raises(ValueError, match=message):
        LoaderState.after(saved, epoch=0, steps=saved.steps).steps_done(other)


def test_steps_and_ranks_outside_the_plan_are_errors() -> None:
    plan = BatchPlan(8, 2, 2, "drop")
    for step, rank in ((2, 0), (-1, 0), (0, 2), (0, -1)):
        with pytest.raises(IndexError, match="outside"):
            plan.positions(step, rank)


def test_a_plan_of_impossible_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size must be >= 1, got 0"):
        BatchPlan(8, 0, 2, "drop")
    with pytest.raises(ValueError, match="'pad'; choose from drop, short, even, repeat"):
        BatchPlan(8, 1, 2, "pad")  # type: ignore[arg-type] # what a user may write in a file
    with pytest.raises(ValueError, match="shards of a shard window must be >= 1, got 0"):
        ShardWindow(4, 0)


def test_samples_are_left_out_by_status_and_by_supervision() -> None:
    chosen = admitted(np.array([4, 0, 9, 1, 0]), np.array([0, 0, 1, 0, 1], np.uint8), min_supervised=1)
    assert chosen.samples.tolist() == [0, 3]
    assert (chosen.not_good, chosen.unsupervised) == (2, 1)
    side = np.array([True, False, True])
    chosen = admitted(np.array([4, 0, 0]), np.array([0, 1, 0], np.uint8), min_supervised=1, among=side)
    assert chosen.samples.tolist() == [0]
    assert (chosen.not_good, chosen.unsupervised) == (0, 1)


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shapes \(3,\), \(2,\)"):
        admitted(np.ones(3), np.zeros(2), min_supervised=0)


def some_digests(count: int) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 2**64, (count, 2), np.uint64)


@given(st.lists(st.tuples(words, words)), st.floats(0, 1), words)
def test_the_split_follows_its_specification(digests, fraction, seed) -> None:
    expected = [fold(3, seed, *digest) >> 11 < int(fraction * 2**53) for digest in digests]
    assert split_mask(np.array(digests, np.uint64).reshape(-1, 2), fraction, seed).tolist() == expected


@given(words, st.permutations(range(40)), st.integers(0, 40))
def test_the_split_stays_when_the_corpus_grows_or_is_reordered(seed, places, count) -> None:
    digests, places = some_digests(40), np.array(places[:count], np.int64)
    assert split_mask(digests[places], 0.3, seed).tolist() == split_mask(digests, 0.3, seed)[places].tolist()


def test_a_larger_fraction_keeps_what_a_smaller_one_chose() -> None:
    digests = some_digests(4000)
    small, large = split_mask(digests, 0.1, 7), split_mask(digests, 0.2, 7)
    assert not (small & ~large).any()
    assert (small.mean(), large.mean()) == pytest.approx((0.1, 0.2), abs=0.02)


def test_the_whole_and_nothing_are_fractions_too() -> None:
    assert split_mask(some_digests(100), 1.0, 0).all()
    assert not split_mask(some_digests(100), 0.0, 0).any()


def test_a_split_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1, got 5"):
        split_mask(some_digests(2), 5, 0)
    with pytest.raises(ValueError, match=r"\(N, 2\) uint64, got int64"):
        split_mask(np.zeros((3, 2), np.int64), 0.5, 0)
