"""Counting a source or a store; from some rows, taken at random, to all: the projection and its range, and the time."""

import math
from collections import Counter

import numpy as np
import pytest

from dspark_store.inspection.estimate.estimation import (
    Bytes,
    Corpus,
    chosen_numbers,
    count_source,
    count_store,
    measured_duration,
    projected,
)
from dspark_store.readers.cache import Cache
from dspark_store.sources.dummy import DummySource
from dspark_store.sources.source import SourceError
from tests.stores import RAGGED, build_store


def source(samples=40):
    return DummySource(samples=samples, min_length=2, max_length=30, vocab=50, seed=1)


@pytest.mark.parametrize("samples", [1, 3, 5])
def test_all_rows_are_taken_when_they_are_few(samples):
    corpus = count_source(source(samples), 30, 5, all_kept=False)
    assert [row.number for row in corpus.rows] == list(range(samples))


def test_every_row_is_as_likely_as_any_other(monkeypatch):
    kept: Counter[int] = Counter()
    few = source(12)
    for seed in range(600):
        monkeypatch.setattr("dspark_store.inspection.estimate.estimation._SEED", seed)
        rows = count_source(few, 30, 4, all_kept=False).rows
        assert len(rows) == 4
        assert all(np.array_equal(row.input_ids, few.sample(row.number).input_ids) for row in rows)
        kept.update(row.number for row in rows)
    assert max(abs(kept[number] - 200) for number in range(12)) < 60  # five standard deviations


def test_a_source_that_knows_its_lengths_is_not_read_through(monkeypatch):
    read = count_source(source(), 30, 6, all_kept=False)
    monkeypatch.setattr(DummySource, "read", None)
    known = count_source(source(), 30, 6, all_kept=True)
    assert known.lengths.tolist() == read.lengths.tolist()
    assert known.supervised is None
    assert read.supervised is not None
    assert read.supervised.tolist() == read.lengths.tolist()
    assert [len(row) for row in known.rows] == known.lengths[[row.number for row in known.rows]].tolist()
    assert len({row.number for row in known.rows}) == 6


def test_a_source_without_samples_is_refused(monkeypatch):
    monkeypatch.setattr(DummySource, "lengths", lambda self: np.zeros(4, np.int64))
    with pytest.raises(SourceError, match="no samples"):
        count_source(source(), 30, 6, all_kept=True)


def test_rows_of_a_growing_store_are_those_with_states(tmp_path):
    store = build_store(tmp_path / "store", without_shards=(0, 2))
    corpus = count_store(Cache(store.storage, allow_incomplete=True), 10)
    assert corpus.lengths.tolist() == list(RAGGED)
    assert [row.number for row in corpus.rows] == [3, 4, 5]
    assert all(np.array_equal(row.input_ids, store.samples[row.number].ids) for row in corpus.rows)
    assert all(np.array_equal(row.loss_mask, store.samples[row.number].mask) for row in corpus.rows)


def test_a_store_that_is_still_reading_its_source_is_refused(tmp_path):
    store = build_store(tmp_path / "store", until="tokens")
    with pytest.raises(ValueError, match="still in its token phase"):
        count_store(Cache(store.storage, allow_incomplete=True), 1)


def test_chosen_numbers_are_different_ones_in_order():
    chosen = chosen_numbers(100, 10)
    assert len(set(chosen)) == 10
    assert list(chosen) == sorted(chosen)
    assert chosen_numbers(3, 10) == [0, 1, 2]


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
