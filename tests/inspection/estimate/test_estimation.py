"""From some rows to all: the projection and its range, and the time."""

import math

import numpy as np
import pytest

from dspark_store.inspection.estimate.corpus import Corpus
from dspark_store.inspection.estimate.estimation import Bytes, Duration, estimate_duration, projected


def corpus_of(lengths):
    return Corpus(np.array(lengths, np.int64), None, ())


def test_all_rows_measured_are_exact():
    tokens = np.array([10, 20, 5])
    found = projected(np.array([31, 58, 17]), tokens, corpus_of(tokens))
    assert found == Bytes.exact(found.expected)
    assert found.expected == pytest.approx(106)


def test_one_row_of_many_gives_no_upper_bound():
    found = projected(np.array([30]), np.array([10]), corpus_of([10, 20]))
    assert (found.expected, found.least, found.most) == (90, 0, math.inf)


def test_the_range_holds_the_truth_nearly_always_though_some_rows_are_odd():
    random = np.random.default_rng(0)
    lengths = random.integers(20, 1000, 2000)
    sizes = lengths * (700 + 20 * random.standard_t(3, 2000))
    corpus, within, errors = corpus_of(lengths), [], []
    for _ in range(400):
        chosen = random.choice(2000, 32, replace=False)
        found = projected(sizes[chosen], lengths[chosen], corpus)
        within.append(float(found.least <= sizes.sum() <= found.most))
        errors.append(found.expected / sizes.sum() - 1)
    assert float(np.mean(within)) > 0.94
    assert abs(float(np.mean(errors))) < 0.005


def duration(**rates):
    return estimate_duration(corpus_of([10, 30, 20, 40]), 2, 2, threads=4, **rates)


def test_the_time_counts_the_padding_of_every_batch():
    assert duration(positions_per_second=10.0) == Duration((30 + 30 + 40 + 40) / 10, None)


def test_a_given_rate_is_taken_at_its_word():
    assert duration(tokens_per_second=5.0, positions_per_second=10.0) == Duration(20.0, None)


def test_encoding_that_is_slower_than_the_target_decides():
    found = duration(positions_per_second=1000.0, encode_seconds=0.4)
    assert found is not None
    assert (found.forward, found.encode, found.seconds) == (0.14, 10.0, 10.0)


def test_no_rate_is_no_time():
    assert duration() is None
