"""What a copy is to be: its record, and the bytes that are still to come."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dspark_store import open_cache
from dspark_store.format.dtypes import cache_dtype
from dspark_store.format.grid import default_chunk_tokens
from dspark_store.format.manifest import StoreRecord, parse_record
from dspark_store.format.schema import StoreSchema
from dspark_store.format.storage import LocalStorage
from dspark_store.inspection.copy_plan import CopySettings, CopySize, copy_record, refuse_small_disk
from dspark_store.inspection.rechunk import rechunk
from tests.inspection.copies import MANIFEST
from tests.stores import Shape, build_store

SCHEMA = StoreSchema(10, 3, 2048, 2560, 3, (2, -1, 5), cache_dtype("bf16"), "default", 256)
SOURCE = StoreRecord("5ma11", SCHEMA, "complete", True, MANIFEST, {"vocab_size": 9}, {"tied": True}, ({"host": "a"},))
SHAPE = Shape(seq_length=256, shard_size=4, chunk_tokens=64, hidden_size=32)
LENGTHS = (200, 3, 256, 100, 64, 65, 40, 150, 256)


def test_what_the_source_knows_of_its_target_carries_over():
    copy = copy_record(SOURCE, "seal", CopySettings("none", 64, 4, (5, 2)))
    assert (copy.target_config, copy.head, copy.producers) == (SOURCE.target_config, SOURCE.head, SOURCE.producers)
    changed = {"codec": "none", "chunk_tokens": 64, "shard_size": 4, "target_layer_ids": [2, 5]}
    assert copy.manifest == {**MANIFEST, **changed, "target_hidden_dim": 2 * 2560}
    assert (copy.phase, copy.checksums, copy.weights) == ("tokens", {}, {})


def test_fields_that_the_manifest_lacks_stay_away():
    copy = copy_record(replace(SOURCE, manifest={"pad_token_id": 5}), "seal", CopySettings("none", 64, 4, (5,)))
    assert copy.manifest == {"pad_token_id": 5}


def test_the_size_of_shards_that_was_asked_of_the_source_carries_over():
    """It is greater than R in a store of one short shard."""
    source = replace(SOURCE, manifest={**MANIFEST, "shard_size": 256})
    assert copy_record(source, "seal", CopySettings()).manifest["shard_size"] == 256
    assert copy_record(source, "seal", CopySettings(shard_size=5)).manifest["shard_size"] == 5


def test_every_copy_has_an_id_of_its_own_and_the_same_each_time():
    settings = [CopySettings(), CopySettings("fast"), CopySettings(shard_size=4), CopySettings(layers=(2,))]
    ids = {copy_record(SOURCE, "seal", each).store_id for each in settings}
    ids |= {copy_record(SOURCE, "another", CopySettings()).store_id, SOURCE.store_id}
    assert len(ids) == 6
    assert copy_record(SOURCE, "seal", CopySettings("fast")).store_id in ids


@pytest.mark.parametrize(("old", "new"), [("default", "none"), ("none", "default")])
def test_chunks_follow_a_codec_that_compresses_or_not(old, new):
    source = replace(SOURCE, schema=replace(SCHEMA, codec=old, chunk_tokens=100))
    chosen = default_chunk_tokens(2560, 2, 2048, compressed=new != "none")
    assert copy_record(source, "seal", CopySettings(new)).schema.chunk_tokens == chosen != 100
    assert copy_record(source, "seal", CopySettings(new, chunk_tokens=77)).schema.chunk_tokens == 77


def test_chunks_stay_as_they_are_between_codecs_that_compress():
    source = replace(SOURCE, schema=replace(SCHEMA, chunk_tokens=100))
    assert copy_record(source, "seal", CopySettings("fast")).schema.chunk_tokens == 100


def test_what_a_copy_was_made_from_is_written_down_and_read_back():
    copy = copy_record(SOURCE, "seal", CopySettings(shard_size=5))
    attributes = copy.attributes()
    assert attributes["copied_from"] == {
        "store_id": "5ma11",
        "seal": "seal",
        "capture_shard_size": 3,
        "shard_size": 3,
        "codec": "default",
        "chunk_tokens": 256,
        "layer_ids": [2, -1, 5],
    }
    assert parse_record(attributes, "a test") == copy
    assert "copied_from" not in SOURCE.attributes()
    assert (SOURCE.capture_shard_size, copy.capture_shard_size) == (3, 3)


@pytest.mark.parametrize("broken", [{}, {"store_id": "x"}, [1], "text"])
def test_what_is_no_origin_is_damage(broken):
    attributes = {**copy_record(SOURCE, "seal", CopySettings()).attributes(), "copied_from": broken}
    with pytest.raises(ValueError, match="malformed"):
        parse_record(attributes, "a test")


def stored_bytes(root):
    """Return what a store's objects take, links once, without its metadata."""
    files = {path.stat().st_ino: path.stat().st_size for path in root.rglob("c.*")}
    return sum(files.values())


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    place = tmp_path_factory.mktemp("sized") / "source"
    return build_store(place, shape=SHAPE, lengths=LENGTHS, fields={"manifest": MANIFEST}).path


@pytest.mark.parametrize(
    "settings",
    [
        CopySettings(),
        CopySettings(shard_size=2),
        CopySettings(codec="none"),
        CopySettings(codec="none", chunk_tokens=1),
    ],
    ids=str,
)
def test_what_is_to_come_is_about_what_comes(source, tmp_path, settings):
    cache = open_cache(source)
    size = CopySize(cache, copy_record(cache.record, "seal", settings))
    shards = range(size.record.schema.tokens.num_shards)
    rechunk(source, tmp_path / "copy", settings)
    assert size.coming(shards, shards) == pytest.approx(stored_bytes(tmp_path / "copy"), rel=0.15)


def test_what_is_there_does_not_come_again(source):
    cache = open_cache(source)
    size = CopySize(cache, copy_record(cache.record, "seal", CopySettings()))
    parts = [size.coming([0, 1, 2], [0, 1, 2]), size.coming([], [0, 1, 2]), size.coming([], [1]), size.coming([], [])]
    assert parts == sorted(parts, reverse=True)
    assert len(set(parts)) == 4


def test_fewer_layers_take_less(source):
    cache = open_cache(source)
    whole, part = (
        CopySize(cache, copy_record(cache.record, "seal", settings)).raw([0, 1, 2])
        for settings in (CopySettings(), CopySettings(layers=(2,)))
    )
    assert (whole, part) == (sum(LENGTHS) * 3 * 64, sum(LENGTHS) * 2 * 64)


def test_a_disk_is_too_small_by_one_byte(monkeypatch, source):
    storage = LocalStorage(source)
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 1000)
    refuse_small_disk(storage, 1000)
    with pytest.raises(
        ValueError, match=r"about 1.00 KB, embedding and head included, are still to be written to .*, 1.00 KB are free"
    ):
        refuse_small_disk(storage, 1001)
