"""What is known of a store's samples, from its index or from its first token shards."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.inspection import sample_counts
from dspark_store.inspection.sample_counts import read_ledgers, shard_sums, survey_index, survey_shards
from dspark_store.readers.index import StoreIndex
from tests.stores import RAGGED, build_store, flip


def survey_tokens(store, damage):
    tokens, _ = read_ledgers(store.storage, store.record, StoreIndex(store.storage, store.record), damage)
    return survey_shards(store.storage, store.record, tokens, damage)


@given(st.lists(st.integers(0, 2048)), st.integers(1, 5))
def test_sums_over_shards_are_those_of_its_samples(values, size):
    expected = [sum(values[first : first + size]) for first in range(0, len(values), size)]
    assert shard_sums(np.array(values, np.int32), size).tolist() == expected


def test_index_and_token_shards_tell_the_same(tmp_path):
    growing, complete = build_store(tmp_path / "g", until="tokens"), build_store(tmp_path / "c")
    damage: list[str] = []
    one = survey_tokens(growing, damage)
    other = survey_index(StoreIndex(complete.storage, complete.record), complete.record, damage)
    assert (one.samples, damage) == (other.samples, [])
    for name in ("shard_samples", "shard_tokens", "lengths", "supervised"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name


def test_a_few_shards_speak_for_all(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_counts, "TOKEN_SHARDS_READ", 2)
    survey = survey_tokens(build_store(tmp_path / "s", until="tokens", lengths=(10,) * 9 + (20,)), [])
    assert survey.lengths is not None
    assert survey.shard_tokens is not None
    assert survey.lengths.tolist() == [10, 10, 10, 20]
    assert (survey.samples, survey.shard_samples.tolist()) == (10, [3, 3, 3, 1])
    assert survey.shard_tokens.sum() == pytest.approx(10 * 12.5, abs=4)


def test_token_shards_that_cannot_be_read_leave_the_number_of_samples(tmp_path):
    store = build_store(tmp_path / "s", until="tokens")
    for shard in range(3):
        flip(store.path / f"loss_mask/c.{shard}.0", 2)
    damage: list[str] = []
    survey = survey_tokens(store, damage)
    assert (survey.samples, survey.shard_tokens, survey.lengths) == (len(RAGGED), None, None)
    assert ["loss_mask" in line for line in damage] == [True] * 3
