"""Matching samples by digest: every sample once, duplicates too, and the same whichever store comes first."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.inspection.state_diff import match_samples

TOKENS = st.lists(st.integers(0, 5), max_size=12)


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
