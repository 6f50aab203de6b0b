"""What is known of a store's samples: their lengths, the rows of the ledgers, the shards that are read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.format.ledger import counted_objects, distinct_bytes
from dspark_store.inspection import sample_survey
from dspark_store.inspection.sample_survey import (
    length_bins,
    read_ledgers,
    shard_sums,
    spread,
    summarise_lengths,
    survey_index,
    survey_shards,
)
from dspark_store.readers.index import StoreIndex
from tests.stores import RAGGED, build_store, flip


@given(st.lists(st.integers(0, 200_000), min_size=1))
def test_every_length_is_in_one_of_at_most_ten_bins(lengths):
    bins = length_bins(np.array(lengths))
    assert len(bins) <= 10
    assert [part.first for part in bins[1:]] == [part.last + 1 for part in bins[:-1]]
    assert (bins[0].first, bins[-1].last) == (0, max(lengths))
    for part in bins:
        assert part.samples == sum(part.first <= length <= part.last for length in lengths)


@pytest.mark.parametrize(("longest", "width"), [(9, 1), (10, 2), (19, 2), (20, 5), (280, 50), (2048, 500)])
def test_the_width_of_a_bin_is_a_round_number(longest, width):
    assert length_bins(np.array([longest]))[0].last == width - 1


def test_a_summary_tells_the_middle_and_who_is_at_the_limit():
    summary = summarise_lengths(np.array([4, 8, 1, 8]), limit=8)
    assert summary is not None
    assert (summary.shortest, summary.median, summary.longest, summary.mean) == (1, 4, 8, 5.25)
    assert summary.at_limit == 2


def test_without_samples_there_is_nothing_to_tell():
    assert summarise_lengths(np.array([], np.int32), limit=8) is None


def read(store):
    damage: list[str] = []
    return *read_ledgers(store.storage, store.record, StoreIndex(store.storage, store.record), damage), damage


@given(st.lists(st.integers(0, 10**6), unique=True).map(sorted), st.integers(2, 50))
def test_a_spread_is_ascending_and_has_both_ends(shards, most):
    chosen = spread(shards, most)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(most, len(shards))
    assert [*chosen[:1], *chosen[-1:]] == [*shards[:1], *shards[-1:]]


def test_a_growing_store_has_the_rows_that_it_has_once_complete(tmp_path):
    growing, complete = build_store(tmp_path / "g", until="states"), build_store(tmp_path / "c")
    for one, other in zip(read(growing)[:2], read(complete)[:2], strict=True):
        assert list(one.committed) == list(one.shards) == list(other.shards) == [0, 1, 2]
        assert np.array_equal(one.rows, other.rows)


def test_of_many_rows_some_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_survey, "MOST_ROWS", 2)
    tokens, states, damage = read(build_store(tmp_path / "s", until="states", without_shards=(0,)))
    assert (list(tokens.committed), list(tokens.shards)) == ([0, 1, 2], [0, 2])
    assert (list(states.committed), list(states.shards), damage) == ([1, 2], [1, 2], [])


def test_a_broken_row_is_told_and_the_others_are_read(tmp_path):
    store = build_store(tmp_path / "s", until="states")
    flip(store.path / "ledger/states/c.1.0.0", 3)
    tokens, states, damage = read(store)
    assert (list(tokens.shards), list(states.shards), list(states.committed)) == ([0, 1, 2], [0, 2], [0, 1, 2])
    assert damage == ["1 of the rows of ledger/states cannot be read: object ledger/states/c.1.0.0 fails its checksum"]


def test_a_damaged_table_of_objects_is_told_and_the_ledger_read_instead(tmp_path):
    store = build_store(tmp_path / "s")
    expected = read(store)
    flip(store.path / "index/objects/c.0.0.0", 3)
    tokens, states, damage = read(store)
    assert np.array_equal(tokens.rows, expected[0].rows)
    assert np.array_equal(states.rows, expected[1].rows)
    assert ["index/objects" in line for line in damage] == [True]


def test_an_object_with_two_places_counts_once_and_the_cursor_not_at_all(tmp_path):
    shared, own = build_store(tmp_path / "a"), build_store(tmp_path / "b", shared_last=False)
    for store, number in ((shared, 3), (own, 4)):
        objects = StoreIndex(store.storage, store.record).objects
        assert counted_objects(objects[:, 3:]).sum(axis=1).tolist() == [number] * 3
        files = (path for path in store.path.glob("[it l]*_*/c.*") if path.is_file())
        inodes = {path.stat().st_ino: path.stat().st_size for path in files}
        assert int(distinct_bytes(objects).sum()) == sum(inodes.values())


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
    monkeypatch.setattr(sample_survey, "TOKEN_SHARDS_READ", 2)
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
