"""What rows and tables come to is what the writers store."""

from __future__ import annotations

import pytest
import torch

from dspark_store.format.objects import Expected, open_object
from dspark_store.format.schema import EMBED, IDS, MASK, object_key
from dspark_store.format.shard import Place
from dspark_store.inspection.estimate.measurement import (
    Variant,
    state_row_bytes,
    table_bytes,
    token_row_bytes,
    variants,
)
from dspark_store.inspection.samples import SampleTokens
from tests.stores import RAGGED, Shape, build_store


@pytest.mark.parametrize("codec", ["none", "fast", "default", "dense"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_row_has_the_bytes_that_the_writer_gives_it(tmp_path, codec, dtype):
    store = build_store(tmp_path / "store", codec=codec, dtype=dtype, shape=Shape(shard_size=1))
    schema = store.schema
    for shard, sample in enumerate(store.samples):
        for item in schema.state_objects:
            states = sample.last if item.layer_id is None else sample.layers[item.slot]
            stored = chunk_bytes(store, item.key(shard), schema.states, item.place(shard))
            assert state_row_bytes(schema, states) == stored
        stored_tokens = [
            chunk_bytes(store, object_key(column, shard), schema.tokens, Place(column, 0, None, shard))
            for column in (IDS, MASK)
        ]
        assert [*token_row_bytes(schema, SampleTokens(shard, sample.ids, sample.mask))] == stored_tokens


def chunk_bytes(store, key, slots, place):
    found = open_object(store.storage, key, slots, Expected(store.record.store_id, place))
    found.reader.close()
    return int(found.tail.bounds.max())


def test_a_small_table_is_exact(tmp_path):
    store = build_store(tmp_path / "store")
    files = (store.path / EMBED).glob("c.*")
    assert table_bytes(store.schema, store.embed) == sum(path.stat().st_size for path in files)


def test_a_large_table_is_judged_by_some_of_its_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("dspark_store.format.schema._WEIGHT_CHUNK_BYTES", 1024)
    store = build_store(tmp_path / "store", shape=Shape(vocab=3000, hidden_size=32))
    files = [path.stat().st_size for path in (store.path / EMBED).glob("c.*")]
    assert len(files) > 100
    assert table_bytes(store.schema, store.embed) == pytest.approx(sum(files), rel=0.02)


def test_another_variant_takes_the_chunks_that_go_best_with_it(tmp_path):
    schema = build_store(tmp_path / "store", lengths=RAGGED[:1], shape=Shape(seq_length=512)).schema
    assert Variant("default", "bf16").schema(schema) is schema
    changed = Variant("none", "fp32").schema(schema)
    assert (changed.codec, changed.dtype.name, changed.chunk_tokens) == ("none", "fp32", 128)
    assert Variant("none", "fp32").schema(schema, 96).chunk_tokens == 96


def test_states_that_are_rounded_are_measured_beside_the_exact_ones(tmp_path):
    schema = build_store(tmp_path / "store").schema
    rounded = Variant("default", "bf16", 2).schema(schema)
    assert (rounded.mantissa_bits, rounded.chunk_tokens) == (2, schema.chunk_tokens)
    states = torch.randn(40, schema.hidden_size)
    assert state_row_bytes(rounded, states) < state_row_bytes(schema, states)
    assert [*variants(["bf16"], 2)][:2] == [Variant("none", "bf16"), Variant("none", "bf16", 2)]


def test_a_codec_whose_package_is_missing_is_left_out(monkeypatch):
    monkeypatch.setattr("dspark_store.format.codecs.importlib.util.find_spec", lambda name: None)
    assert [*variants(["bf16"])] == [Variant(codec, "bf16") for codec in ("none", "fast", "default")]
