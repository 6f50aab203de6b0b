"""The manifest decides identity: by content, never by path, name or bookkeeping."""

from dataclasses import replace
from typing import Any, cast

import pytest

from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.dtypes import cache_dtype
from dspark_store.format.int8 import LayerScale
from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.manifest import (
    StoreRecord,
    identity_digest,
    mismatch_fields,
    parse_record,
    seal_digest,
)
from dspark_store.format.schema import EMBED, HEAD_BIAS, StoreSchema

SCHEMA = StoreSchema(7, 3, 20, 8, 2, (2, -1), cache_dtype("bf16"), "default", 8)
RECORD = StoreRecord(
    "an-id",
    SCHEMA,
    phase="states",
    declared_complete=True,
    manifest={"dtype": "bf16", "seq_length": 20},
    target_config={"hidden_size": 8},
    head={"softcap": 30.0},
    producers=({"torch": "2.9"},),
    weights={"target/lm_head/weight": [19, 8]},
    checksums={"index/length": "00"},
)


def test_equal_manifests_do_not_differ():
    assert mismatch_fields({"dtype": "bf16"}, {"dtype": "bf16"}) == []


def test_fields_that_differ_are_named_in_order():
    assert mismatch_fields({"dtype": "bf16", "a": 1, "same": 0}, {"dtype": "fp16", "b": 2, "same": 0}) == [
        "a",
        "b",
        "dtype",
    ]


def test_a_missing_field_equals_null():
    assert mismatch_fields({"train_split": None}, {}) == []


DIGESTS: dict[str, JsonValue] = {"source": {"type": "chat"}, "target_weights": "0" * 64}


@pytest.mark.parametrize("field", ["format_version", "complete", "target_model", "train_data_path", "target_revision"])
def test_bookkeeping_paths_and_names_are_not_compared_beside_digests(field):
    assert mismatch_fields({**DIGESTS, field: "one"}, {**DIGESTS, field: "other"}) == []
    assert mismatch_fields({**DIGESTS, field: "one"}, {field: "other"}) == ["source", "target_weights"]
    assert identity_digest({field: "one", "dtype": "bf16"}) == identity_digest({"dtype": "bf16"})


@pytest.mark.parametrize(("field", "digest"), [("target_model", "target_weights"), ("train_data_path", "source")])
def test_a_path_or_a_name_is_compared_where_no_digest_tells_the_content(field, digest):
    others = {name: value for name, value in DIGESTS.items() if name != digest}
    assert mismatch_fields({**others, field: "one"}, {**others, field: "other"}) == [field]
    assert mismatch_fields({field: "one"}, {}) == [field]


def test_fields_to_ignore_are_not_compared():
    assert mismatch_fields({"num_samples": 3}, {"num_samples": 4}, ignore=frozenset({"num_samples"})) == []


def test_the_number_of_samples_is_no_part_of_the_identity():
    assert identity_digest({"num_samples": 3}) == identity_digest({"num_samples": 4}) == identity_digest({})


def test_another_value_is_another_identity():
    assert identity_digest({"dtype": "bf16"}) != identity_digest({"dtype": "fp16"})
    assert len(identity_digest({})) == 32


def test_a_record_comes_back_from_its_attributes():
    assert parse_record(RECORD.attributes(), "here") == RECORD


def test_a_store_counts_as_complete_in_its_last_phase_only():
    assert not RECORD.complete
    assert replace(RECORD, phase="complete").complete


@pytest.mark.parametrize("version", [999, 0, None, "1"])
def test_another_format_version_is_refused_with_both_numbers(version):
    attributes = {**RECORD.attributes(), "format_version": version}
    with pytest.raises(ValueError, match=f"format_version {version!r}, this version of dspark-store reads 1"):
        parse_record(attributes, "here")


@pytest.mark.parametrize(
    "field", [name for name in RECORD.attributes() if name not in ("format_version", "complete", "semantics")]
)
def test_a_missing_attribute_is_damage(field):
    attributes = {name: value for name, value in RECORD.attributes().items() if name != field}
    with pytest.raises(
        DamagedStoreError, match=f"the store at here is malformed: attributes: field '{field}' is missing"
    ):
        parse_record(attributes, "here")


@pytest.mark.parametrize("version", [True, 1.0])
def test_what_only_equals_the_format_version_is_another(version):
    with pytest.raises(ValueError, match="format_version"):
        parse_record({**RECORD.attributes(), "format_version": version}, "here")


WRONG: list[tuple[str, JsonValue]] = [
    ("store_id", 5),
    ("phase", "over"),
    ("phase", None),
    ("declared_complete", 1),
    ("complete", "yes"),
    ("manifest", None),
    ("manifest", [1]),
    ("manifest", {"target_vocab_size": "9"}),
    ("manifest", {"num_hidden_layers": True}),
    ("manifest", {"num_hidden_layers": -1}),
    ("manifest", {"pad_token_id": 2**40}),
    ("manifest", {"pad_token_id": 1.5}),
    ("manifest", {"target_layer_ids": 3}),
    ("manifest", {"target_layer_ids": ["a"]}),
    ("manifest", {"target_model": ["a"]}),
    ("manifest", {"source": "a"}),
    ("layout", []),
    ("target_config", "x"),
    ("head", None),
    ("head", {"tied": "yes"}),
    ("head", {"logit_scale": "1"}),
    ("semantics", "x"),
    ("producers", {}),
    ("producers", ["x"]),
    ("producers", [{"equality_class": {}}]),
    ("producers", [{"tokens_per_second": "fast"}]),
    ("checksums", []),
    ("checksums", {"index/length": 5}),
    ("copied_from", 5),
    ("copied_from", {}),
    ("weights", []),
    ("weights", {EMBED: 5}),
    ("weights", {EMBED: [9]}),
    ("weights", {EMBED: [9, 9, 9]}),
    ("weights", {EMBED: [0, 8]}),
    ("weights", {EMBED: [True, 8]}),
    ("weights", {EMBED: [9, 7]}),
    ("weights", {EMBED: [2**31, 8]}),
    ("weights", {HEAD_BIAS: [9, 8]}),
    ("weights", {"../docs": [0, 8]}),
    ("weights", {"/etc": [9, 8]}),
    ("weights", {"target/other": [9, 8]}),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_value_of_a_wrong_type_is_damage_in_one_line(field, value):
    with pytest.raises(DamagedStoreError, match="the store at here is malformed: ") as caught:
        parse_record({**RECORD.attributes(), field: value}, "here")
    assert "\n" not in str(caught.value)


def test_the_seal_follows_every_attribute_and_every_node():
    attributes, nodes = RECORD.attributes(), {"index": {"node_type": "group"}}
    seal = seal_digest(attributes, nodes)
    assert seal_digest({**attributes, "seal": "any"}, nodes) == seal
    assert seal_digest(attributes, {"index": {"node_type": "array"}}) != seal
    for name in attributes:
        assert seal_digest({**attributes, name: "changed"}, nodes) != seal


SCALE = LayerScale(-16, tuple(range(8)), 0.02, 0.0)
CODED = replace(
    RECORD,
    schema=replace(RECORD.schema.stored_as("int8"), scales=(SCALE,) * (RECORD.schema.num_layers + 1)),
    manifest={**RECORD.manifest, "state_dtype": "int8"},
)


def test_a_store_of_codes_is_of_version_2_and_read_back_as_it_was():
    attributes = CODED.attributes()
    assert (attributes["format_version"], attributes["features"]) == (2, ["int8"])
    assert parse_record(attributes, "here") == CODED
    assert RECORD.attributes().keys().isdisjoint({"features"})
    assert {"state_dtype", "calibration"}.isdisjoint(RECORD.schema.layout())


@pytest.mark.parametrize("features", [["int8", "buckets"], ["\n" * 99], [7], {"int8": 1}, "int8", 3, None])
def test_a_feature_that_is_not_known_is_refused_by_name(features):
    with pytest.raises(ValueError, match="has the feature ") as refusal:
        parse_record({**CODED.attributes(), "features": features}, "here")
    assert "buckets" in str(refusal.value) or "buckets" not in str(features)


@pytest.mark.parametrize(
    "changed",
    [{"features": []}, {"format_version": 1}, {"format_version": 1, "features": []}, {"manifest": RECORD.manifest}],
    ids=str,
)
def test_features_that_are_not_those_of_the_layout_are_damage(changed):
    with pytest.raises(DamagedStoreError, match=r"features are|state_dtype is"):
        parse_record({**CODED.attributes(), **changed}, "here")


def test_a_store_without_features_is_not_of_version_2():
    with pytest.raises(DamagedStoreError, match="features are"):
        parse_record({**RECORD.attributes(), "format_version": 2, "features": []}, "here")


@pytest.mark.parametrize(
    "broken",
    [{"offset": 99}, {"offset": 1.5}, {"high_channels": [1, 0]}, {"high_channels": [0]}, {"error": "small"}],
    ids=str,
)
def test_a_calibration_that_none_can_have_is_damage(broken):
    layout = CODED.schema.layout()
    calibration = [{**entry, **broken} for entry in cast("list[dict[str, Any]]", layout["calibration"])]
    with pytest.raises(DamagedStoreError):
        parse_record({**CODED.attributes(), "layout": {**layout, "calibration": calibration}}, "here")


def test_a_calibration_of_other_objects_is_damage():
    layout = CODED.schema.layout()
    with pytest.raises(DamagedStoreError, match="scales"):
        parse_record({**CODED.attributes(), "layout": {**layout, "calibration": [SCALE.to_json()]}}, "here")
