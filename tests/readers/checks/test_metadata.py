"""A root that was changed is told from a node that was, and both from a column that was re-encoded on purpose."""

import json

import pytest

from dspark_store.format.damage import Part
from dspark_store.format.schema import LAYERS, metadata_bytes
from dspark_store.readers.checks.store_check import check_metadata
from tests.readers.test_foreign import rewrite
from tests.stores import build_store

CONFIG = {"target_config": {"rms_norm_eps": 1e-06}}


@pytest.fixture
def store(tmp_path):
    return build_store(tmp_path / "store", lengths=(3, 9), fields=CONFIG)


def edit(store, key, before, after):
    text = (store.path / key).read_text()
    assert before in text
    (store.path / key).write_text(text.replace(before, after, 1))


def found(store):
    checked = check_metadata(store.storage)
    return [(problem.part, problem.key) for problem in checked.problems], checked.record is not None


def test_a_good_tree_has_no_problem(store):
    assert found(store) == ([], True)


def test_a_changed_node_is_named_and_the_root_is_not(store):
    edit(store, "index/length/zarr.json", "sample", "simple")
    assert found(store) == ([(Part.NODE, "index/length/zarr.json")], True)


def test_a_changed_root_is_named_and_no_node_is(store):
    edit(store, "zarr.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 2e-06')
    assert found(store) == ([(Part.ROOT, "zarr.json")], True)


def test_a_root_that_describes_other_arrays_is_not_believed(store):
    edit(store, "zarr.json", '"seq_length": 20', '"seq_length": 21')
    assert found(store) == ([(Part.ROOT, "zarr.json")], False)


def test_a_root_whose_fields_are_of_other_types_is_not_believed(store):
    root = json.loads((store.path / "zarr.json").read_text())
    root["attributes"]["dspark_store"]["checksums"] = "none"
    (store.path / "zarr.json").write_bytes(metadata_bytes(root))
    assert found(store) == ([(Part.ROOT, "zarr.json")], False)


@pytest.mark.parametrize(
    ("key", "before", "after"),
    [
        ("zarr.json", "1e-06", "1E-06"),
        ("zarr.json", '"zarr_format": 3', '"zarr_format": 3.0'),
        ("zarr.json", '"attributes": {', '"attributes": {"mine": 1,'),
        ("index/zarr.json", "3", "3.0"),
        (f"{LAYERS}/zarr.json", "8", "8.0"),
        ("input_ids/zarr.json", ": ", ":  "),
    ],
)
def test_an_edit_that_leaves_the_value_is_found(store, key, before, after):
    edit(store, key, before, after)
    problems, believed = found(store)
    assert [place for _, place in problems] == [key]
    assert believed


def test_a_column_that_was_re_encoded_may_have_any_text(store):
    rewrite(store, LAYERS, (1, 8, 8))
    checked = check_metadata(store.storage)
    assert not checked.problems
    assert checked.foreign == {LAYERS}


def test_a_re_encoded_column_hides_no_other_change(store):
    rewrite(store, LAYERS, (1, 8, 8))
    edit(store, "loss_mask/zarr.json", "255", "254")
    assert found(store) == ([(Part.NODE, "loss_mask/zarr.json")], True)


def test_a_missing_node_is_named(store):
    (store.path / LAYERS / "zarr.json").unlink()
    assert found(store) == ([(Part.NODE, f"{LAYERS}/zarr.json")], True)
