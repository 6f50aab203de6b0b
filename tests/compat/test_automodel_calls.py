"""Calls of the upstream interface in any order, with lengths or without, and with mistakes."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dspark_store as ds
from tests.upstream import LENGTH, WIDTH, manifest_of, row, same, shard_of, write_cache


def test_shards_and_weights_may_come_before_the_manifest(tmp_path):
    embed, head = nn.Embedding(40, WIDTH), nn.Linear(WIDTH, 40, bias=False)
    ds.write_shard(tmp_path, 0, shard_of(2))
    ds.write_target_weights(tmp_path, embed, head, torch.float32)
    ds.write_shard(tmp_path, 1, shard_of(1, seed=1))
    with pytest.raises(FileNotFoundError, match="manifest not found"):
        ds.read_manifest(tmp_path)
    ds.write_manifest(tmp_path, manifest_of(3))
    assert same(ds.CachedDSparkDataset(tmp_path)[2], row(shard_of(1, seed=1), 0))
    assert torch.equal(ds.read_target_weight_modules(tmp_path)[1].weight, head.weight)


def test_a_manifest_that_comes_first_completes_with_the_last_shard(tmp_path):
    ds.write_manifest(tmp_path, manifest_of(3))
    ds.write_shard(tmp_path, 1, shard_of(1))
    with pytest.raises(ValueError, match=r"shard indices.*missing \[0\]"):
        ds.CachedDSparkDataset(tmp_path)
    ds.write_shard(tmp_path, 0, shard_of(2))
    assert len(ds.CachedDSparkDataset(tmp_path)) == 3


def test_weights_may_come_last_and_leave_the_cache_complete(tmp_path):
    shards = write_cache(tmp_path, 2)
    ds.write_target_weights(tmp_path, nn.Embedding(40, WIDTH), nn.Linear(WIDTH, 40), torch.float32)
    assert same(ds.CachedDSparkDataset(tmp_path)[0], row(shards[0], 0))


def test_a_complete_cache_can_be_declared_incomplete_again(tmp_path):
    write_cache(tmp_path, 2)
    ds.write_manifest(tmp_path, {**manifest_of(2), "complete": False})
    with pytest.raises(ValueError, match="incomplete"):
        ds.CachedDSparkDataset(tmp_path)


@pytest.mark.parametrize("value", [1, "true", None, False])
def test_only_a_literal_true_is_complete(tmp_path, value):
    with pytest.raises(ValueError, match="incomplete"):
        ds.ensure_manifest_complete({"complete": value}, tmp_path)
    ds.write_shard(tmp_path, 0, shard_of(2))
    ds.write_manifest(tmp_path, {**manifest_of(2), "complete": value})
    with pytest.raises(ValueError, match="incomplete"):
        ds.CachedDSparkDataset(tmp_path)


def test_a_rewritten_shard_replaces_the_old_one(tmp_path):
    shards = write_cache(tmp_path, 3)
    ds.write_shard(tmp_path, 0, shard_of(2, seed=7))
    dataset = ds.CachedDSparkDataset(tmp_path)
    assert same(dataset[1], row(shard_of(2, seed=7), 1))
    assert same(dataset[2], row(shards[1], 0))
    assert ds.verify_store(dataset.cache) == []


def test_a_shard_that_shares_its_last_layer_and_then_does_not_is_replaced_too(tmp_path):
    shared = shard_of(2)
    shared["target_hidden_states"][..., -WIDTH:] = shared["target_last_hidden_states"]
    ds.write_shard(tmp_path, 0, shared)
    ds.write_shard(tmp_path, 0, shard_of(2, seed=3))
    ds.write_manifest(tmp_path, manifest_of(2))
    assert same(ds.CachedDSparkDataset(tmp_path)[0], row(shard_of(2, seed=3), 0))


def test_rows_without_lengths_are_stored_whole(tmp_path):
    shards = write_cache(tmp_path, 2)
    cache = ds.open_cache(tmp_path)
    assert cache.lengths.tolist() == [LENGTH, LENGTH]
    assert same(cache[1], row(shards[0], 1))


def test_rows_with_lengths_are_zero_past_their_end(tmp_path):
    shard = shard_of(2)
    ds.write_shard(tmp_path, 0, shard, lengths=[3, 0])
    ds.write_manifest(tmp_path, manifest_of(2))
    cache = ds.open_cache(tmp_path)
    assert cache.lengths.tolist() == [3, 0]
    assert cache.supervised.tolist() == [int(shard["loss_mask"][0, :3].sum()), 0]
    for key, values in cache[0].items():
        assert torch.equal(values[:3], shard[key][0, :3])
        assert not values[3:].any()
    assert not any(values.any() for values in cache[1].values())


def test_what_stands_past_a_rows_length_does_not_matter(tmp_path):
    shard = shard_of(1)
    shard["input_ids"][:, 2:] = -100
    ds.write_shard(tmp_path, 0, shard, lengths=[2])
    ds.write_manifest(tmp_path, manifest_of(1))
    assert ds.open_cache(tmp_path)[0]["input_ids"].tolist() == [*shard["input_ids"][0, :2].tolist(), 0, 0]


@pytest.mark.parametrize("lengths", [[2], [2, LENGTH + 1], [2, -1], [1, 2, 3]])
def test_lengths_that_do_not_fit_are_refused(tmp_path, lengths):
    with pytest.raises(ValueError, match=r"lengths of shard 0 must be 2 numbers in 0\.\.4"):
        ds.write_shard(tmp_path, 0, shard_of(2), lengths=lengths)


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("input_ids", (2, 5)),
        ("loss_mask", (1, LENGTH)),
        ("target_hidden_states", (2, LENGTH, 2 * WIDTH)),
        ("target_last_hidden_states", (2, LENGTH, WIDTH + 1)),
    ],
)
def test_a_shard_of_another_shape_is_refused(tmp_path, key, shape):
    ds.write_manifest(tmp_path, manifest_of(3))
    shard = shard_of(2)
    shard[key] = torch.zeros(shape, dtype=shard[key].dtype)
    with pytest.raises(ValueError, match=rf"{key} of shard 0 has shape .*expected"):
        ds.write_shard(tmp_path, 0, shard)


def test_a_shard_of_another_dtype_is_refused(tmp_path):
    ds.write_manifest(tmp_path, manifest_of(3))
    with pytest.raises(ValueError, match=r"target_hidden_states of shard 0 is torch\.bfloat16, the store is fp32"):
        ds.write_shard(tmp_path, 0, shard_of(2, dtype=torch.bfloat16))


def test_a_shard_larger_than_the_manifest_says_is_refused(tmp_path):
    ds.write_manifest(tmp_path, manifest_of(5))
    with pytest.raises(ValueError, match="shard 0 has 3 samples, expected 1 to 2"):
        ds.write_shard(tmp_path, 0, shard_of(3))


@pytest.mark.parametrize(("key", "value"), [("input_ids", -1), ("loss_mask", 2), ("loss_mask", 255)])
def test_tokens_that_stand_for_nothing_are_refused(tmp_path, key, value):
    shard = shard_of(2)
    shard[key][1, 1] = value
    with pytest.raises(ValueError, match=f"{key} of shard 0 holds"):
        ds.write_shard(tmp_path, 0, shard)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("dtype", {"dtype": "bf16"}),
        ("hidden_size", {"target_text_config": SimpleNamespace(hidden_size=8, vocab_size=40, num_hidden_layers=6)}),
        ("seq_length", {"seq_length": 8}),
        ("num_layers", {"target_layer_ids": [1, 3]}),
        ("shard_size", {"shard_size": 4}),
    ],
)
def test_a_manifest_that_contradicts_the_shards_is_refused_and_changes_nothing(tmp_path, field, changes):
    ds.write_shard(tmp_path, 0, shard_of(2))
    before = (tmp_path / "zarr.json").read_bytes()
    with pytest.raises(ValueError, match=rf"manifest does not match the shards.*{field}"):
        ds.write_manifest(tmp_path, manifest_of(5, **changes))
    assert (tmp_path / "zarr.json").read_bytes() == before


def test_weights_of_another_dtype_than_the_cache_are_refused(tmp_path):
    ds.write_manifest(tmp_path, manifest_of(2))
    with pytest.raises(ValueError, match=r"weights are torch\.bfloat16, the cache is torch\.float32"):
        ds.write_target_weights(tmp_path, nn.Embedding(40, WIDTH), nn.Linear(WIDTH, 40), torch.bfloat16)


@pytest.mark.parametrize(
    ("embed", "head", "side"),
    [(nn.Identity(), nn.Linear(4, 4), "input embeddings"), (nn.Embedding(4, 4), nn.Identity(), "output embeddings")],
)
def test_a_module_without_weight_is_refused_by_its_side(tmp_path, embed, head, side):
    with pytest.raises(ValueError, match=side):
        ds.write_target_weights(tmp_path, embed, head, torch.float32)


def test_a_cache_without_weights_says_so(tmp_path):
    write_cache(tmp_path, 2)
    with pytest.raises(FileNotFoundError, match="without target weights"):
        ds.read_target_weight_modules(tmp_path)


def test_no_cache_is_no_manifest(tmp_path):
    for function in (ds.read_manifest, ds.CachedDSparkDataset, ds.open_cache):
        with pytest.raises(FileNotFoundError, match="manifest not found"):
            function(tmp_path / "nowhere")


def test_another_format_version_is_refused_on_writing_and_on_reading(tmp_path):
    with pytest.raises(ValueError, match="format_version"):
        ds.write_manifest(tmp_path, {**manifest_of(2), "format_version": 999})
    write_cache(tmp_path, 2)
    document = json.loads((tmp_path / "zarr.json").read_text())
    document["attributes"]["dspark_store"]["format_version"] = 999
    (tmp_path / "zarr.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match="format_version 999"):
        ds.read_manifest(tmp_path)


def test_a_shard_below_zero_is_refused(tmp_path):
    with pytest.raises(ValueError, match="shard_index must be >= 0"):
        ds.write_shard(tmp_path, -1, shard_of(2))


@pytest.mark.parametrize("ids", [torch.full((2, 4), 2**32 + 7), torch.full((2, 4), 1.5)])
def test_ids_that_would_be_stored_as_others_are_refused(tmp_path, ids):
    samples = shard_of(2)
    samples["input_ids"] = ids.expand(samples["input_ids"].shape[0], -1)[:, : samples["input_ids"].shape[1]]
    with pytest.raises(ValueError, match="input_ids of shard 0"):
        ds.write_shard(tmp_path, 0, samples)
