"""From some rows to all: the projection and its range, and the time."""

import math

import numpy as np
import pytest

from dspark_store.inspection.estimate.corpus import Corpus
from dspark_store.inspection.estimate.estimation import Bytes, measured_duration, projected


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


@pytest.mark.parametrize(
    ("rate", "encode", "seconds"), [(10.0, 0.1, (14.0, 10.0, 14.0)), (1000.0, 0.1, (0.14, 10.0, 10.0))]
)
def test_the_time_counts_the_padding_of_every_batch_or_the_slower_encoding(rate, encode, seconds):
    found = measured_duration(corpus_of([10, 30, 20, 40]), 2, 2, rate, encode)
    assert (found.forward, found.encode, found.seconds) == seconds
