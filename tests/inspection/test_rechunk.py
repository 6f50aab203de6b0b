"""Copies under other settings hold what their source holds."""

from __future__ import annotations

import weakref

import pytest
import torch
import zarr

from dspark_store import open_cache
from dspark_store.cli.main import main
from dspark_store.format.codecs import CODEC_PRESETS
from dspark_store.format.ledger import token_ledger
from dspark_store.format.metadata import read_record
from dspark_store.format.schema import IDS, LAST, LAYERS, NO_RECORD
from dspark_store.format.storage import LocalStorage
from dspark_store.inspection import copy_shards
from dspark_store.inspection.copy_plan import CopySettings
from dspark_store.inspection.rechunk import rechunk
from dspark_store.inspection.shardwise import Workers
from dspark_store.writers.states import StateShardWriter
from tests.inspection.copies import (
    MANIFEST,
    OTHER,
    assert_copied,
    assert_zarr_agrees,
    contents,
)
from tests.readers.test_foreign import rewrite
from tests.stores import build_store, flip

pytestmark = pytest.mark.usefixtures("unsynced")


@pytest.fixture
def source(tmp_path):
    fields = {"manifest": MANIFEST, "head": {"tied": False}, "producers": ({"host": "a", "tokens_per_second": 7.5},)}
    return build_store(tmp_path / "source", fields=fields).path


@pytest.mark.parametrize(("dtype", "codec"), [*zip(("bf16", "fp16", "fp32", "bf16"), CODEC_PRESETS, strict=True)])
def test_every_dtype_is_copied_to_every_codec(dtype, codec, tmp_path):
    source = build_store(tmp_path / "source", dtype=dtype, codec="fast").path
    assert rechunk(source, tmp_path / "copy", CopySettings(codec=codec))
    assert assert_copied(source, tmp_path / "copy").schema.codec == codec
    assert_zarr_agrees(source, tmp_path / "copy")


@pytest.mark.parametrize(
    "made",
    [
        {"shared_last": False},
        {"tied": True},
        {"bias": True},
        {"weights": False},
        {"spoiled": 4},
        {"lengths": (0, 3, 0, 0, 20)},
        {"sources": ("chats", "code", "papers")},
    ],
    ids=str,
)
def test_a_store_of_any_kind_is_copied(made, tmp_path):
    source = build_store(tmp_path / "source", **made).path
    rechunk(source, tmp_path / "copy", OTHER)
    assert_copied(source, tmp_path / "copy")
    for store in (source, tmp_path / "copy"):  # what stands at two places is written once, and nothing else is
        tables = [store / "target" / name / "weight" / "c.0.0" for name in ("embed_tokens", "lm_head")]
        assert "weights" in made or tables[0].samefile(tables[1]) == ("tied" in made)
        last, layer = store / LAST / "c.0.0.0", store / LAYERS / "c.0.0.2"
        assert last.samefile(layer) == ("shared_last" not in made)


@pytest.mark.parametrize(
    ("chunk_tokens", "shard_size"), [(1, 2), (5, 1), (5, 3), (5, 50), (8, 6), (8, 7), (20, 2), (99, 4)]
)
def test_chunks_and_shards_of_any_size_hold_the_same(source, place, chunk_tokens, shard_size):
    rechunk(source, place, CopySettings(chunk_tokens=chunk_tokens, shard_size=shard_size))
    schema = assert_copied(source, place).schema
    positions = -(-20 // schema.chunk_tokens) * schema.chunk_tokens
    assert zarr.open_array(place / LAYERS, mode="r").shards == (shard_size, positions, 8)
    assert (schema.chunk_tokens, schema.shard_size) == (min(chunk_tokens, 20), shard_size)


def test_without_other_settings_only_the_stores_id_differs(source, place):
    rechunk(source, place, CopySettings())
    old, new = contents(source), contents(place)
    assert old.keys() == new.keys()
    ids = [read_record(LocalStorage(path)).store_id.encode() for path in (source, place)]
    assert ids[0] != ids[1]
    for name in (name for name in old if name.startswith((IDS, LAYERS, LAST, "target/"))):
        assert old[name].replace(ids[0], ids[1]) == new[name], name


def test_layers_that_were_asked_for_are_kept_in_the_order_of_the_source(source, place):
    rechunk(source, place, CopySettings(layers=(5, 2, 5)))
    copy = assert_copied(source, place, layers=(2, 5))
    assert copy.layer_ids == (2, 5)
    assert (copy.manifest["target_layer_ids"], copy.manifest["target_hidden_dim"]) == ([2, 5], 16)
    assert (place / LAST / "c.0.0.0").samefile(place / LAYERS / "c.0.0.1")


def test_a_sample_is_good_once_the_layer_that_was_not_is_left_out(tmp_path):
    source = build_store(tmp_path / "source", spoiled=4).path
    rechunk(source, tmp_path / "copy", CopySettings(layers=(-1,)))
    assert open_cache(tmp_path / "copy").status.tolist() == [0] * 7


@pytest.mark.parametrize("column", [LAYERS, LAST])
def test_columns_that_somebody_rewrote_are_copied(column, tmp_path):
    store = build_store(tmp_path / "source")
    rewrite(store, column, (1, 20, 8))
    rechunk(store.path, tmp_path / "copy", OTHER)
    assert assert_copied(store.path, tmp_path / "copy").foreign_columns == frozenset()


def test_a_copy_says_what_it_was_copied_from_and_a_copy_of_it_what_was_captured(source, place, tmp_path):
    rechunk(source, place, OTHER)
    copied = read_record(LocalStorage(place)).copied_from
    assert copied is not None
    assert (copied.shard_size, copied.codec, copied.chunk_tokens, copied.layer_ids) == (3, "default", 8, (2, -1, 5))
    assert copied.store_id == read_record(LocalStorage(source)).store_id
    rechunk(place, tmp_path / "again", CopySettings(shard_size=5))
    again = read_record(LocalStorage(tmp_path / "again"))
    assert (again.capture_shard_size, again.schema.shard_size) == (3, 5)
    assert again.copied_from is not None
    assert again.copied_from.shard_size == 2


def test_a_ledger_row_has_the_cursor_where_a_shard_of_the_source_ends(source, place):
    rechunk(source, place, CopySettings(shard_size=2))
    rows = [token_ledger(LocalStorage(place)).row(shard) for shard in range(4)]
    assert [int(row[2, 0]) for row in rows] == [NO_RECORD, NO_RECORD, 200, 300]  # after 2, 4, 6 and all 7 samples
    assert [int(row[2, 1]) for row in rows] == [2, 2, 2, 1]


def test_a_finished_copy_is_left_alone(source, place):
    assert rechunk(source, place, OTHER)
    before = contents(place)
    assert not rechunk(source, place, OTHER)
    assert contents(place) == before


def test_any_number_of_threads_writes_the_same_bytes(source, tmp_path):
    for threads in (1, 4):
        rechunk(source, tmp_path / str(threads), OTHER, workers=Workers(threads))
    assert contents(tmp_path / "1") == contents(tmp_path / "4")


def test_a_shard_is_never_in_memory_as_a_whole(tmp_path, monkeypatch):
    source = build_store(tmp_path / "source", lengths=[20] * 60).path
    alive: list[weakref.ref[torch.Tensor]] = []
    most: list[int] = []
    add = StateShardWriter.add

    def counted(self, row, layers, last):
        alive.append(weakref.ref(last))
        most.append(sum(states() is not None for states in alive))
        add(self, row, layers, last)

    monkeypatch.setattr(StateShardWriter, "add", counted)
    monkeypatch.setattr(copy_shards, "_BUFFER_BYTES", 4096)
    rechunk(source, tmp_path / "copy", CopySettings(shard_size=60), workers=Workers(1))
    assert len(alive) == 60
    assert max(most) < 15


@pytest.mark.parametrize(
    "key",
    [
        "target_hidden_states/c.1.0.0",
        "target_last_hidden_states/c.0.0.0",
        "input_ids/c.1.0",
        "loss_mask/c.0.0",
        "target/embed_tokens/weight/c.0.0",
        "index/length/c.0",
        "ledger/states/c.1.0.0",
    ],
)
def test_a_repaired_copy_is_made_whole_by_the_same_command(tmp_path, capsys, key):
    source = build_store(tmp_path / "source", fields={"manifest": MANIFEST}).path
    copy = tmp_path / "copy"
    command = ["rechunk", str(source), str(copy), "--codec", "fast", "--shard-size", "4"]
    assert main(command) == 0
    before = contents(copy)
    flip(copy / key, 30)
    assert main(["verify", str(copy)]) == 1
    assert main(["repair", str(copy)]) == 0
    printed = capsys.readouterr().out
    assert "is complete" in printed or "run the dspark-store rechunk that made" in printed
    assert main(command) == 0
    assert contents(copy) == before
