"""Samples of two stores are paired by their tokens, and their states compared however they are cut."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.inspection.state_diff import StateDifference, compare_states, difference, match_samples
from dspark_store.readers.cache import open_cache
from tests.stores import build_store

TOKENS = st.lists(st.integers(0, 5), max_size=12)
NAN, INF = float("nan"), float("inf")


def digests(samples):
    """Return digests that differ in their second word only for some samples, and in both for others."""
    return np.array([(sample // 2, sample) for sample in samples], np.uint64).reshape(-1, 2)


@given(TOKENS, TOKENS)
def test_every_sample_is_in_one_pair_or_in_one_store_only(a, b):
    found = match_samples(digests(a), digests(b))
    assert sorted([*found.a.tolist(), *found.only_a.tolist()]) == list(range(len(a)))
    assert sorted([*found.b.tolist(), *found.only_b.tolist()]) == list(range(len(b)))
    assert [a[place] for place in found.a] == [b[place] for place in found.b]
    assert len(found) == (Counter(a) & Counter(b)).total()


@given(TOKENS, TOKENS)
def test_the_other_way_round_the_pairs_are_the_same(a, b):
    found, mirrored = match_samples(digests(a), digests(b)), match_samples(digests(b), digests(a))
    assert (found.a.tolist(), found.b.tolist()) == (mirrored.b.tolist(), mirrored.a.tolist())
    assert (found.only_a.tolist(), found.only_b.tolist()) == (mirrored.only_b.tolist(), mirrored.only_a.tolist())


def test_a_sample_is_paired_with_the_one_at_its_own_place_first():
    found = match_samples(digests([7, 1, 7, 2]), digests([3, 1, 7, 7]))
    assert sorted(zip(found.a.tolist(), found.b.tolist(), strict=True)) == [(0, 3), (1, 1), (2, 2)]
    assert (found.moved, found.only_a.tolist(), found.only_b.tolist()) == (1, [3], [0])


def bf16(*values):
    return torch.tensor(values, dtype=torch.bfloat16)


def test_equal_bits_have_no_difference_even_if_they_are_not_numbers():
    assert difference(bf16(1, NAN, INF), bf16(1, NAN, INF)) is None


@pytest.mark.parametrize(
    ("a", "b", "largest"),
    [
        ((1, 2), (1.5, 2), 0.5),
        ((0.0,), (-0.0,), 0.0),
        ((NAN, 1), (1, 1), INF),
        ((NAN, INF, 1), (NAN, INF, 2), 1.0),
        ((INF,), (-INF,), INF),
    ],
)
def test_the_largest_difference_is_the_same_either_way(a, b, largest):
    assert difference(bf16(*a), bf16(*b)) == difference(bf16(*b), bf16(*a)) == largest


def test_dtypes_are_compared_by_value():
    assert difference(bf16(1, NAN), torch.tensor([1, NAN])) is None
    assert difference(bf16(1), torch.tensor([1.001])) == pytest.approx(0.001, rel=1e-3)


def test_the_worst_sample_is_the_first_of_those_that_differ_most():
    values = np.array([(-1, -1), (0.5, -1), (0.25, 0.5), (-1, 0.0)])
    found = StateDifference(np.array([3, 2, 1, 0]), np.array([13, 12, 11, 10]), (7,), values)
    assert (found.compared, found.equal) == (4, 1)
    assert found.by_layer == {7: (0.5, 2), None: (0.5, 2)}
    assert found.worst is not None
    assert (found.worst.a, found.worst.b) == (1, 11)


@pytest.mark.parametrize("piece", [1, 10_000])
def test_each_pair_is_compared_once_however_it_is_cut(tmp_path, monkeypatch, piece):
    monkeypatch.setattr("dspark_store.inspection.state_diff._READ_BYTES", piece)
    a, b = (
        open_cache(build_store(tmp_path / name, spoiled=spoiled).path, allow_reduced_depth=True)
        for name, spoiled in (("a", None), ("b", 4))
    )
    found = compare_states(a, b, match_samples(a.index.digest, b.index.digest), [5, 2], threads=2)
    assert (found.compared, found.equal) == (7, 6)
    assert found.by_layer == {5: (0.0, 0), 2: (INF, 1), None: (0.0, 0)}
    assert found.worst is not None
    assert (found.worst.a, found.worst.b) == (4, 4)


def test_no_pairs_are_no_work(tmp_path):
    cache = open_cache(build_store(tmp_path / "a").path)
    none = match_samples(cache.index.digest, np.empty((0, 2), np.uint64))
    assert compare_states(cache, cache, none, [2]).compared == 0
