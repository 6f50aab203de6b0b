"""Which differences of metadata are of identity, of layout, and none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dspark_store.format.dtypes import cache_dtype
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import StoreSchema
from dspark_store.inspection.compare import compare_metadata

SCHEMA = StoreSchema(10, 4, 100, 32, 2, (1, 3), cache_dtype("bf16"), "default", 64)
RECORD = StoreRecord("id", SCHEMA, manifest={"codec": "default", "batch_size": 4}, target_config={"rope": {"theta": 1}})


def names(a, b):
    different = compare_metadata(a, b)
    return tuple(
        [found.field for found in group] for group in (different.identity, different.layout, different.recorded)
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ([], [], [])),
        ({"batch_size": 8}, (["batch_size"], [], [])),
        ({"codec": "none", "num_samples": 3}, ([], [], [])),  # what counts is how the arrays are
        ({"target_revision": "x", "split": None}, ([], [], ["target_revision"])),
        ({"train_data_path": "x"}, (["train_data_path"], [], [])),  # nothing else tells the data
        ({"train_data_path": "x", "source": {"type": "chat"}}, (["source"], [], ["train_data_path"])),
    ],
)
def test_a_field_of_the_manifest_is_of_one_kind(change, expected):
    assert names(RECORD, replace(RECORD, manifest={**RECORD.manifest, **change})) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_samples": 20}, ([], [], [])),
        ({"codec": "none", "shard_size": 8}, ([], ["codec", "shard_size"], [])),
        ({"layer_ids": (1, 2)}, (["layer_ids"], [], [])),
    ],
)
def test_the_shape_of_the_arrays_is_compared_where_no_manifest_tells_it(change, expected):
    assert names(RECORD, replace(RECORD, schema=replace(SCHEMA, **change))) == expected


def test_a_field_in_a_field_is_named_by_its_path():
    assert names(RECORD, replace(RECORD, target_config={"rope": {"theta": 2}}))[0] == ["target_config.rope.theta"]


def test_a_configuration_may_have_fields_that_an_older_one_does_not_know():
    newer = replace(RECORD, target_config={"rope": {"theta": 1}, "new": True})
    assert names(RECORD, newer) == names(newer, RECORD) == ([], [], [])
    assert names(RECORD, replace(RECORD, target_config=None))[0] == ["target_config"]
