"""The rows of a store's ledgers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.format.ledger import counted_objects, distinct_bytes
from dspark_store.inspection import sample_counts
from dspark_store.inspection.sample_counts import read_ledgers, spread
from dspark_store.readers.index import StoreIndex
from tests.stores import build_store, flip


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
    monkeypatch.setattr(sample_counts, "MOST_ROWS", 2)
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
