"""Bytes of columns and layers, as stored and as values, and of the files beside them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dspark_store.format.dtypes import cache_dtype
from dspark_store.format.schema import StoreSchema
from dspark_store.inspection.sizes import (
    ShardRows,
    compare,
    files_beside,
    layer_sizes,
    shares_tables,
    token_sizes,
    total_size,
)
from tests.stores import build_store

SCHEMA = StoreSchema(5, 3, 10, 4, 2, (0, 1), cache_dtype("fp32"), "default", 5)
VECTOR = 16
# Two shards of 3 and 2 samples; in the first one, slot 1 is the object of the last hidden states.
SHARDS = ShardRows(
    np.array([[(7, 1), (9, 2), (9, 2)], [(70, 3), (80, 4), (90, 5)]], np.uint64),
    samples=np.array([3, 2]),
    tokens=np.array([20, 10]),
    factor=1.0,
)


def test_a_shared_object_counts_in_the_shards_that_share_it():
    first, second, last = layer_sizes(SCHEMA, SHARDS)
    assert (first.stored_bytes, second.stored_bytes, last.stored_bytes) == (77, 80, 99)
    assert (first.logical_bytes, second.logical_bytes, last.logical_bytes) == (30 * VECTOR, 10 * VECTOR, 30 * VECTOR)
    assert (second.padded_bytes, second.shared) == (2 * 10 * VECTOR, False)
    assert (first.name, first.layer_id, last.layer_id) == ("target_hidden_states", 0, None)


def test_a_layer_shared_everywhere_takes_nothing():
    shared = replace(SHARDS, rows=SHARDS.rows[:1], samples=SHARDS.samples[:1], tokens=np.array([20]))
    _, second, last = layer_sizes(SCHEMA, shared)
    assert (second.stored_bytes, second.logical_bytes, second.of_ragged_rows, second.shared) == (0, 0, 0, True)
    assert (last.stored_bytes, last.shared) == (9, False)


def test_a_factor_scales_the_bytes_and_not_what_they_are_of_ragged_rows():
    for one, twice in zip(layer_sizes(SCHEMA, SHARDS), layer_sizes(SCHEMA, replace(SHARDS, factor=2.0)), strict=True):
        assert one.logical_bytes is not None
        assert twice.stored_bytes == 2 * one.stored_bytes
        assert twice.logical_bytes == 2 * one.logical_bytes
        assert twice.of_ragged_rows == one.of_ragged_rows


def test_without_lengths_only_what_is_stored_is_known():
    unknown = replace(SHARDS, tokens=None)
    total = total_size("together", layer_sizes(SCHEMA, unknown))
    assert (total.stored_bytes, total.logical_bytes, total.of_ragged_rows) == (256, None, None)


def test_ids_and_mask_are_four_bytes_and_one():
    rows = np.array([[(3, 1), (2, 2), (99, 3)]], np.uint64)
    ids, mask = token_sizes(SCHEMA, ShardRows(rows, np.array([3]), np.array([12]), 1.0))
    assert (ids.logical_bytes, ids.padded_bytes, ids.stored_bytes) == (48, 120, 3)
    assert (mask.logical_bytes, mask.padded_bytes, mask.stored_bytes) == (12, 30, 2)


def test_columns_of_any_dtype_add_up_to_what_they_are_of_ragged_bf16_rows():
    row = 3 * 4 * 2 + 5  # K + 1 = 3 vectors of 4 features in bf16, though the cache dtype is fp32
    rows = np.array([[(3, 1), (2, 2), (9, 3)]], np.uint64)
    ids, mask = token_sizes(SCHEMA, ShardRows(rows, np.array([3]), np.array([12]), 1.0))
    assert ids.of_ragged_rows == 3 / (12 * row)
    assert total_size("tokens", (ids, mask)).of_ragged_rows == pytest.approx(5 / (12 * row))
    assert [part.of_ragged_rows for part in layer_sizes(SCHEMA, SHARDS)] == [n / (30 * row) for n in (77, 80, 99)]


def test_no_samples_are_no_share_of_ragged_rows():
    compared = compare(SCHEMA, 0, 0, 0)
    assert (compared.stored_of_ragged_rows, compared.padded_of_ragged_rows) == (None, None)


def groups_of(store):
    return {group.name: group for group in files_beside(store.storage)}


def test_index_ledger_target_and_metadata_are_counted_apart(tmp_path):
    store = build_store(tmp_path / "s")
    groups = groups_of(store)
    assert (groups["index"].files, groups["ledger"].files) == (5, 6)
    metadata = [*store.path.rglob("zarr.json"), *store.path.rglob("root.json")]
    assert groups["metadata"].files == len(metadata)
    assert groups["metadata"].bytes == sum(path.stat().st_size for path in metadata)
    assert groups["unfinished"].files == groups["other"].files == 0


def test_a_tied_head_takes_nothing(tmp_path):
    tied, own = build_store(tmp_path / "tied", tied=True), build_store(tmp_path / "own")
    assert (shares_tables(tied.record), shares_tables(own.record)) == (True, False)
    assert (groups_of(tied)["target"].files, groups_of(own)["target"].files) == (1, 2)


def test_what_does_not_belong_is_told_apart(tmp_path):
    store = build_store(tmp_path / "s")
    (store.path / "index" / ".c.0.ab.tmp").write_bytes(b"12345")
    (store.path / "notes").mkdir()
    (store.path / "notes" / "read.me").write_bytes(b"123")
    groups = groups_of(store)
    assert (groups["unfinished"].bytes, groups["other"].bytes) == (5, 3)
