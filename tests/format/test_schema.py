"""Which arrays a store has, and that stock zarr-python understands the metadata of each."""

import json
from dataclasses import replace

import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.format.codecs import CODEC_PRESETS
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.dtypes import CACHE_DTYPES, cache_dtype
from dspark_store.format.schema import (
    COLUMNS,
    EMBED,
    HEAD_BIAS,
    IDS,
    LAST,
    LAYERS,
    MASK,
    STATE_LEDGER,
    TOKEN_LEDGER,
    ArraySpec,
    StoreSchema,
    group_document,
    metadata_bytes,
    object_key,
    parse_layout,
)
from dspark_store.format.shard import Place

SCHEMA = StoreSchema(7, 3, 20, 8, 2, (2, -1), cache_dtype("bf16"), "default", 8)
LAYERS_ANYHOW = st.lists(st.integers(-1, 60), min_size=1, max_size=5, unique=True).map(tuple)
SIZES = st.integers(1, 50)
SCHEMAS = st.builds(
    lambda n, r, s, h, layers, dtype, codec, t: StoreSchema(n, r, s, h, len(layers), layers, dtype, codec, t),
    st.integers(0, 50),
    SIZES,
    SIZES,
    SIZES,
    LAYERS_ANYHOW,
    st.sampled_from(list(CACHE_DTYPES.values())),
    st.sampled_from(CODEC_PRESETS),
    SIZES,
)


def every_array(schema: StoreSchema) -> dict[str, ArraySpec]:
    weights = {EMBED: schema.weights((19, 8)), HEAD_BIAS: schema.weights((19,))}
    return {**schema.columns(), **schema.ledgers(), **schema.token_index(), **schema.final_index(), **weights}


@given(SCHEMAS)
def test_a_layout_comes_back(schema):
    assert parse_layout(json.loads(json.dumps(schema.layout()))) == schema


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_samples", "7"),
        ("num_samples", True),
        ("num_samples", -1),
        ("num_samples", 2**62),
        ("num_samples", 2**63),
        ("seq_length", 1.5),
        ("seq_length", 2**40),
        ("shard_size", 0),
        ("shard_size", 2**31),
        ("hidden_size", 0),
        ("hidden_size", 2**31),
        ("chunk_tokens", 2**40),
        ("num_layers", 2**20),
        ("num_layers", 3),
        ("layer_ids", None),
        ("layer_ids", [0, True, 2]),
        ("layer_ids", [-2, 0, 1]),
        ("dtype", "fp8"),
        ("dtype", ["bf16"]),
        ("codec", "gzip"),
        ("sources", "ab"),
        ("sources", [1, 2]),
    ],
)
def test_a_layout_with_a_wrong_value_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}|{value}|of a column"):
        parse_layout({**SCHEMA.layout(), field: value})


@pytest.mark.parametrize("field", SCHEMA.layout())
def test_a_layout_without_a_field_is_refused(field):
    with pytest.raises(DamagedStoreError, match=f"field '{field}' is missing"):
        parse_layout({name: value for name, value in SCHEMA.layout().items() if name != field})


@given(SCHEMAS)
def test_shards_are_whole_chunks_and_layers_are_objects(schema):
    for path, spec in schema.columns().items():
        assert spec.inner is not None
        assert all(shard % chunk == 0 for shard, chunk in zip(spec.chunk, spec.inner, strict=True)), path
        assert spec.chunk[0] == schema.shard_size
        assert spec.inner[0] == 1
    wide = schema.columns()[LAYERS]
    assert wide.shape[2] == schema.num_layers * wide.chunk[2]


@given(SCHEMAS)
def test_every_object_of_a_shard_has_its_own_key_and_name(schema):
    objects = schema.state_objects
    assert len({item.key(3) for item in objects}) == len({item.name for item in objects}) == len(objects)
    assert [item.column for item in objects] == [LAYERS] * schema.num_layers + [LAST]


def test_keys_are_zarrs():
    assert object_key(IDS, 12) == "input_ids/c.12.0"
    assert object_key(LAYERS, 12, 3) == "target_hidden_states/c.12.0.3"
    assert object_key(LAST, 12) == "target_last_hidden_states/c.12.0.0"


def test_an_object_names_its_layer_once_a_manifest_does():
    assert SCHEMA.state_objects[1].place(4) == Place(LAYERS, 1, -1, 4)
    assert replace(SCHEMA, layer_ids=()).state_objects[1].place(4) == Place(LAYERS, 1, None, 4)


def test_dimensions_have_names():
    names = {path: spec.dimensions for path, spec in SCHEMA.columns().items()}
    assert names == {
        IDS: ("sample", "position"),
        MASK: ("sample", "position"),
        LAYERS: ("sample", "position", "layer_feature"),
        LAST: ("sample", "position", "feature"),
    }


def test_no_dimension_of_a_group_has_two_sizes():
    sizes: dict[tuple[str, str], set[int]] = {}
    for path, spec in every_array(SCHEMA).items():
        for name, size in zip(spec.dimensions, spec.shape, strict=True):
            sizes.setdefault((path.rpartition("/")[0], name), set()).add(size)
    assert {key: found for key, found in sizes.items() if len(found) > 1} == {}


def test_fills_are_values_that_data_never_has():
    fills = {path: spec.fill_value for path, spec in SCHEMA.columns().items()}
    assert fills == {IDS: -1, MASK: 255, LAYERS: 0xFFFF, LAST: 0xFFFF}
    floats = replace(SCHEMA, dtype=cache_dtype("fp16")).columns()
    assert floats[LAST].fill_value == "NaN"


def test_the_logical_dtype_and_the_layers_are_attributes():
    assert SCHEMA.columns()[LAYERS].attributes == {"dtype": "bfloat16", "layer_ids": [2, -1]}


def test_a_ledger_has_a_row_a_shard_in_an_object_of_its_own():
    ledgers = SCHEMA.ledgers()
    assert (ledgers[TOKEN_LEDGER].shape, ledgers[TOKEN_LEDGER].chunk) == ((3, 3, 2), (1, 3, 2))
    assert (ledgers[STATE_LEDGER].shape, ledgers[STATE_LEDGER].chunk) == ((3, 3, 2), (1, 3, 2))
    assert ledgers[STATE_LEDGER].attributes == {"objects": [f"{LAYERS}/0", f"{LAYERS}/1", LAST]}


def test_weights_are_cut_into_chunks_of_about_4_mib():
    rows = SCHEMA.weights((151_936, 2560)).chunk[0]
    assert rows == 4 * 1024 * 1024 // (2560 * 2)
    assert SCHEMA.weights((10, 8)).chunk == (10, 8)
    assert SCHEMA.weights((10,)).chunk == (10,)


@pytest.mark.parametrize("codec", ["none", "fast", "default"])
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_zarr_python_opens_every_array_as_it_is_meant(dtype, codec, tmp_path):
    schema = replace(SCHEMA, dtype=cache_dtype(dtype), codec=codec)
    for path, spec in every_array(schema).items():
        directory = tmp_path / path
        directory.mkdir(parents=True)
        (directory / "zarr.json").write_bytes(metadata_bytes(spec.document()))
        array = zarr.open_array(directory, mode="r")
        assert (array.shape, array.chunks) == (spec.shape, spec.inner or spec.chunk)
        assert array.shards == (None if spec.inner is None else spec.chunk)
        assert array.metadata.zarr_format == 3
        assert dict(array.attrs) == spec.attributes


def test_a_document_is_indented_text_that_ends_in_a_newline():
    text = metadata_bytes(group_document({"name": "ü"})).decode()
    assert text.startswith('{\n  "zarr_format": 3')
    assert text.endswith("}\n")
    assert "ü" in text


def test_the_columns_are_upstreams_cache_keys():
    assert tuple(SCHEMA.columns()) == COLUMNS
