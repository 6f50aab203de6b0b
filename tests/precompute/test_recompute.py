"""A store's states are computed again in the batches that they were captured in, also where shards are others now."""

import json
import shutil

import pytest
import torch

from dspark_store import open_cache
from dspark_store.inspection import copy_shards
from dspark_store.inspection.copy_plan import CopySettings
from dspark_store.inspection.rechunk import rechunk
from dspark_store.inspection.shardwise import Workers
from dspark_store.precompute.__main__ import main
from dspark_store.precompute.recompute import recompute
from dspark_store.target.capture import TargetCapture
from dspark_store.target.load import load_target
from dspark_store.target.source import TargetSource
from tests.precompute.jobs import BATCH_SIZE, SHARD_SIZE, arguments, contents, refused


@pytest.fixture(scope="module")
def model(llama):
    return load_target(TargetSource(str(llama)), dtype=torch.float32, device=torch.device("cpu"))


class Watched(TargetCapture):
    """A capture that keeps the ids of every batch it was asked for."""

    def __call__(self, input_ids, attention_mask, past=None):
        self.__dict__.setdefault("batches", []).append((input_ids.tolist(), attention_mask.tolist()))
        return super().__call__(input_ids, attention_mask, past)


def run_again(model, path, samples):
    """Return the differences of some samples, and the batches that were run for them."""
    cache = open_cache(path)
    watched = Watched(model, cache.layer_ids)
    return dict(recompute(cache, watched, torch.device("cpu"), BATCH_SIZE, samples)), watched.__dict__["batches"]


@pytest.mark.parametrize("shard_size", [1, 3, 5, 100])
def test_a_copy_is_recomputed_in_the_batches_of_its_source(model, store, tmp_path, shard_size):
    rechunk(store, tmp_path / "copy", CopySettings(shard_size=shard_size, codec="fast"))
    samples = [9, 0, 4, 10, 5]
    differences, batches = run_again(model, tmp_path / "copy", samples)
    assert differences == dict.fromkeys(sorted(samples), 0.0)
    assert batches == run_again(model, store, samples)[1]


def test_some_layers_of_a_copy_are_recomputed(model, store, tmp_path):
    layers = open_cache(store).layer_ids[-2:]
    rechunk(store, tmp_path / "copy", CopySettings(layers=layers[::-1], shard_size=3))
    assert set(run_again(model, tmp_path / "copy", range(11))[0].values()) == {0.0}


def test_states_that_differ_are_seen(model, store, tmp_path):
    with torch.no_grad():
        changed = {name: value.clone() for name, value in model.state_dict().items()}
        model.model.embed_tokens.weight[:] *= 1.5
    try:
        differences, _ = run_again(model, store, [3])
    finally:
        model.load_state_dict(changed)
    assert differences[3] > 0


def unfinished_copy(store, place, monkeypatch, settings):
    def publish(*args):
        raise MemoryError

    monkeypatch.setattr(copy_shards, "publish_states", publish)
    with pytest.raises(MemoryError):
        rechunk(store, place, settings, workers=Workers(1))
    monkeypatch.undo()
    return contents(place)


def test_a_precompute_leaves_an_unfinished_copy_to_rechunk(store, llama, chats, tmp_path, monkeypatch, capsys):
    before = unfinished_copy(store, tmp_path / "copy", monkeypatch, CopySettings())
    for flags in (("--resume",), (), ("--resume", "--estimate")):
        line = refused(arguments(llama, chats, tmp_path / "copy", *flags), capsys, at_once=True)
        assert "unfinished copy" in line
        assert "dspark-store rechunk" in line
    assert contents(tmp_path / "copy") == before


def test_a_copy_of_other_shards_is_not_what_a_precompute_of_these_shards_computes(
    store, llama, chats, tmp_path, capsys, no_target
):
    rechunk(store, tmp_path / "copy", CopySettings(shard_size=2 * SHARD_SIZE))
    job = arguments(llama, chats, tmp_path / "copy", "--resume")
    assert "does not match this run in shard_size" in refused(job, capsys)
    line = refused([*job, "--shard-size", str(2 * SHARD_SIZE)], capsys)
    assert f"batches were formed in shards of {SHARD_SIZE}, this run would form them in shards of" in line


def test_a_copy_of_the_same_shards_is_a_finished_store_to_a_precompute(
    store, llama, chats, tmp_path, capsys, no_target
):
    rechunk(store, tmp_path / "copy", CopySettings())
    assert main(arguments(llama, chats, tmp_path / "copy", "--resume")) == 0
    assert "is complete; nothing to do" in capsys.readouterr().out


def test_the_drop_in_interface_writes_nothing_into_a_copy(store, tmp_path):
    from dspark_store.compat.automodel import read_manifest, write_manifest

    rechunk(store, tmp_path / "copy", CopySettings())
    manifest = read_manifest(tmp_path / "copy")
    assert manifest["shard_size"] == SHARD_SIZE
    with pytest.raises(ValueError, match="is a copy of another store"):
        write_manifest(tmp_path / "copy", manifest)


def test_a_copy_is_no_other_store_because_it_was_moved(store, tmp_path):
    shutil.copytree(store, tmp_path / "moved")
    for source, name in ((store, "one"), (tmp_path / "moved", "other")):
        rechunk(source, tmp_path / name, CopySettings(codec="none"))
    assert contents(tmp_path / "one") == contents(tmp_path / "other")
    attributes = json.loads((tmp_path / "one" / "zarr.json").read_text())["attributes"]["dspark_store"]
    assert attributes["copied_from"]["capture_shard_size"] == SHARD_SIZE
