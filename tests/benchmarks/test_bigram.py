"""The bigram that drafts are measured against."""

import numpy as np
import pytest

from benchmarks.bigram import Bigram


def test_pairs_are_counted_and_a_count_is_added_to_each():
    bigram = Bigram.of([np.array([1, 2, 1, 2, 0]), np.array([1, 3])], vocab_size=4)
    after_one = np.exp(bigram.log_probabilities(np.array([1]), 0.5))[0]
    assert after_one == pytest.approx([0.5 / 5, 0.5 / 5, 2.5 / 5, 1.5 / 5])


def test_a_token_that_nothing_follows_says_nothing():
    bigram = Bigram.of([np.array([1, 2])], vocab_size=4)
    assert np.exp(bigram.log_probabilities(np.array([3]), 1.0))[0] == pytest.approx([0.25] * 4)


def test_every_row_is_a_distribution():
    rows = [np.random.default_rng(seed).integers(0, 50, 40) for seed in range(5)]
    bigram = Bigram.of(rows, vocab_size=50)
    assert np.exp(bigram.log_probabilities(np.arange(50), 0.01)).sum(axis=1) == pytest.approx(np.ones(50), rel=1e-5)
