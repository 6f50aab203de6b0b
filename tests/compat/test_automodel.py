"""The interface of NeMo Automodel's DSpark cache: what its own tests assert, and a script written for it."""

import runpy

import pytest
import torch
from torch import nn

import dspark_store as ds
from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.metadata import read_record
from dspark_store.format.storage import LocalStorage
from tests.upstream import CONFIG, WIDTH, manifest_of, same, shard_of, target_batch, write_cache

UPSTREAM_SCRIPT = """
import os
import dspark_store as cache

def produce(cache_dir, batches, embed, head, config, stop_after=None, **names):
    dtype = cache.DTYPE_MAP["bf16"]
    manifest = cache.build_cache_manifest(
        target_model_type="qwen3", target_text_config=config, seq_length=4, dtype="bf16",
        num_samples=sum(len(batch.input_ids) for batch in batches), shard_size=2, target_layer_ids=[1, 3, 5],
        train_split=None, shuffle_seed=42, mask_reasoning_content=False,
        chat_template_sha256=cache.tokenizer_chat_template_sha256(None),
        **{"target_model": "org/target", "train_data_path": "train.jsonl", **names},
    )
    if os.path.exists(cache.manifest_path(cache_dir)):
        recorded = cache.read_manifest(cache_dir, allow_incomplete=True)
        fields = cache.manifest_mismatch_fields(recorded, manifest)
        if fields:
            raise ValueError(f"the cache does not match in {', '.join(fields)}")
    cache.write_target_weights(cache_dir, embed, head, dtype)
    cache.write_manifest(cache_dir, {**manifest, "complete": False})
    done = cache.existing_shard_indices(cache_dir)
    for index, batch in enumerate(batches[:stop_after]):
        if index not in done:
            cache.write_shard(cache_dir, index, cache.compute_batch_cache(batch, dtype))
            assert os.path.exists(cache.shard_path(cache_dir, index))
    if stop_after is not None:
        return
    cache.write_manifest(cache_dir, {**manifest, "complete": True})

def consume(cache_dir):
    cache.ensure_manifest_complete(cache.read_manifest(cache_dir), cache_dir)
    embed, head = cache.read_target_weight_modules(cache_dir)
    loader = cache.build_cached_dspark_dataloader(cache_dir=cache_dir, batch_size=2, shuffle=False)
    return embed.weight, head.weight, [{key: batch[key] for key in cache.CACHE_KEYS} for batch in loader]
"""


def test_a_batch_becomes_the_four_keys_with_int64_tokens_and_states_in_the_cache_dtype():
    batch = target_batch(2, length=5)
    cached = ds.compute_batch_cache(batch, torch.bfloat16)
    assert tuple(cached) == ds.CACHE_KEYS
    assert {key: values.dtype for key, values in cached.items()} == {
        "input_ids": torch.int64,
        "loss_mask": torch.int64,
        "target_hidden_states": torch.bfloat16,
        "target_last_hidden_states": torch.bfloat16,
    }
    assert torch.equal(cached["input_ids"], batch.input_ids)
    assert torch.equal(cached["target_hidden_states"], batch.target_hidden_states.bfloat16())


def test_a_cache_opens_only_once_it_is_declared_complete(tmp_path):
    manifest = manifest_of(3)
    ds.write_manifest(tmp_path, {**manifest, "complete": False})
    ds.write_shard(tmp_path, 0, shard_of(2))
    ds.write_shard(tmp_path, 1, shard_of(1))
    with pytest.raises(ValueError, match="incomplete"):
        ds.CachedDSparkDataset(tmp_path)
    with pytest.raises(ValueError, match="incomplete"):
        ds.read_manifest(tmp_path)
    ds.write_manifest(tmp_path, {**manifest, "complete": True})
    assert len(ds.CachedDSparkDataset(tmp_path)) == 3


def test_a_manifest_without_complete_counts_as_complete(tmp_path):
    ds.ensure_manifest_complete({}, tmp_path)
    ds.write_shard(tmp_path, 0, shard_of(2))
    ds.write_manifest(tmp_path, manifest_of(2))
    assert ds.read_manifest(tmp_path)["complete"] is True
    assert len(ds.CachedDSparkDataset(tmp_path)) == 2


def test_fewer_shards_than_the_manifest_says_are_refused(tmp_path):
    ds.write_shard(tmp_path, 0, shard_of(2))
    ds.write_shard(tmp_path, 1, shard_of(2))
    ds.write_manifest(tmp_path, manifest_of(99))
    with pytest.raises(ValueError, match="shard indices"):
        ds.CachedDSparkDataset(tmp_path)


def test_a_shard_too_far_in_place_of_a_missing_one_is_refused(tmp_path):
    write_cache(tmp_path, 3)
    (tmp_path / ds.shard_path(tmp_path, 1)).unlink()
    ds.write_shard(tmp_path, 99, shard_of(1))
    assert ds.existing_shard_indices(tmp_path) == {0, 99}
    with pytest.raises(ValueError, match=r"shard indices.*missing \[1\], extra \[99\]"):
        ds.CachedDSparkDataset(tmp_path)


def test_a_shard_without_one_of_the_keys_is_refused(tmp_path):
    shard = shard_of(2)
    del shard["target_last_hidden_states"]
    with pytest.raises(ValueError, match="missing required fields: target_last_hidden_states"):
        ds.write_shard(tmp_path, 0, shard)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("dtype", "tied"), [(torch.bfloat16, False), (torch.float32, True)])
def test_weights_are_read_back_in_the_cache_dtype_and_tied_ones_as_two(tmp_path, dtype, tied):
    embed, head = nn.Embedding(40, WIDTH), nn.Linear(WIDTH, 40, bias=False)
    head.weight = embed.weight if tied else head.weight
    ds.write_target_weights(tmp_path, embed, head, dtype)
    for read, weight in zip(ds.read_target_weight_modules(tmp_path), (embed.weight, head.weight), strict=True):
        assert read.weight.dtype == dtype
        assert torch.equal(read.weight, weight.detach().to(dtype))


def test_existing_shards_are_the_committed_ones(tmp_path):
    assert ds.existing_shard_indices(tmp_path / "nowhere") == set()
    write_cache(tmp_path, 3)
    assert ds.existing_shard_indices(tmp_path) == {0, 1}


def test_a_manifest_has_the_18_fields_and_comes_back_with_bookkeeping(tmp_path):
    manifest = manifest_of(2)
    assert len(manifest) == 18
    assert (manifest["target_hidden_dim"], manifest["target_last_hidden_dim"]) == (48, 16)
    assert ds.write_manifest(tmp_path, manifest) == ds.manifest_path(tmp_path)
    assert ds.read_manifest(tmp_path) == {**manifest, "format_version": 1, "complete": True}


def test_mismatching_fields_are_sorted_and_leave_out_bookkeeping_and_names_beside_digests():
    ours: dict[str, JsonValue] = {"source": {"type": "chat"}, "target_weights": "c"}
    recorded = {**ours, "shuffle_seed": 42, "seq_length": 4, "train_data_path": "a", "target_model": "b"}
    new = {**ours, "shuffle_seed": 7, "seq_length": 8, "train_data_path": "c", "target_model": "d", "complete": True}
    assert ds.manifest_mismatch_fields({**recorded, "train_split": None}, new) == ["seq_length", "shuffle_seed"]


def test_a_manifest_from_before_a_field_equals_one_with_its_default_in_identity_and_in_comparison(tmp_path):
    old = {name: value for name, value in manifest_of(2).items() if name != "mask_generation_prompt"}
    ds.write_manifest(tmp_path / "old", old)
    ds.write_manifest(tmp_path / "new", manifest_of(2))
    old_bytes, new_bytes = ((tmp_path / name / "zarr.json").read_bytes() for name in ("old", "new"))
    assert old_bytes == new_bytes
    recorded = ds.read_manifest(tmp_path / "old")
    assert recorded["mask_generation_prompt"] is False
    assert ds.manifest_mismatch_fields(old, manifest_of(2)) == []
    masked = manifest_of(2, mask_generation_prompt=True)
    assert ds.manifest_mismatch_fields(recorded, masked) == ["mask_generation_prompt"]
    ds.write_manifest(tmp_path / "masked", masked)
    assert ds.read_manifest(tmp_path / "masked")["mask_generation_prompt"] is True
    assert (
        read_record(LocalStorage(tmp_path / "masked")).store_id != read_record(LocalStorage(tmp_path / "old")).store_id
    )


@pytest.fixture
def script(tmp_path):
    (tmp_path / "script.py").write_text(UPSTREAM_SCRIPT)
    return runpy.run_path(str(tmp_path / "script.py"))


@pytest.mark.parametrize("change", [{"train_data_path": "other.jsonl"}, {"target_model": "org/other"}])
def test_a_script_that_stopped_is_not_gone_on_with_other_data_or_another_target(change, script, tmp_path):
    cache_dir = str(tmp_path / "cache")
    embed, head = nn.Embedding(40, WIDTH), nn.Linear(WIDTH, 40, bias=False)
    batches = [target_batch(2, seed=number) for number in range(3)]
    script["produce"](cache_dir, batches, embed, head, CONFIG, stop_after=2)
    before = {path: path.read_bytes() for path in sorted((tmp_path / "cache").rglob("*")) if path.is_file()}
    with pytest.raises(ValueError, match=f"does not match in {next(iter(change))}"):
        script["produce"](cache_dir, batches, embed, head, CONFIG, **change)
    assert {path: path.read_bytes() for path in sorted((tmp_path / "cache").rglob("*")) if path.is_file()} == before
    script["produce"](cache_dir, batches, embed, head, CONFIG)
    assert len(script["consume"](cache_dir)[2]) == 3


def test_a_script_written_for_upstream_runs_and_can_be_run_again(script, tmp_path):
    cache_dir = str(tmp_path / "cache")
    embed, head = nn.Embedding(40, WIDTH), nn.Linear(WIDTH, 40, bias=False)
    batches = [target_batch(2), target_batch(1, seed=1)]
    for _ in range(2):
        script["produce"](cache_dir, batches, embed, head, CONFIG)
        read_embed, read_head, read = script["consume"](cache_dir)
        assert torch.equal(read_embed, embed.weight.detach().bfloat16())
        assert torch.equal(read_head, head.weight.detach().bfloat16())
        cached = [ds.compute_batch_cache(batch, torch.bfloat16) for batch in batches]
        assert all(same(batch, expected) for batch, expected in zip(read, cached, strict=True))
