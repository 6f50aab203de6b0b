"""Batches, shards and manifests as a script for NeMo Automodel's DSpark cache makes them."""

from types import SimpleNamespace

import torch

import dspark_store as ds

LAYER_IDS = [1, 3, 5]
WIDTH, LENGTH = 16, 4
CONFIG = SimpleNamespace(hidden_size=WIDTH, vocab_size=40, num_hidden_layers=6)


def target_batch(rows, seed=0, *, length=LENGTH):
    """What a target gives for a batch: states of three layers and the last ones, in fp32."""
    random = torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        input_ids=torch.randint(40, (rows, length), generator=random),
        loss_mask=torch.randint(2, (rows, length), generator=random),
        target_hidden_states=torch.randn(rows, length, len(LAYER_IDS) * WIDTH, generator=random),
        target_last_hidden_states=torch.randn(rows, length, WIDTH, generator=random),
    )


def shard_of(rows, seed=0, dtype=torch.float32):
    return ds.compute_batch_cache(target_batch(rows, seed), dtype)


def manifest_of(num_samples, **changes):
    fields = {
        "target_model": "org/target",
        "target_model_type": "qwen3",
        "target_text_config": CONFIG,
        "seq_length": LENGTH,
        "dtype": "fp32",
        "num_samples": num_samples,
        "shard_size": 2,
        "target_layer_ids": LAYER_IDS,
        "train_data_path": "train.jsonl",
        "train_split": None,
        "shuffle_seed": 42,
        "mask_reasoning_content": False,
        "chat_template_sha256": "0" * 64,
    }
    return ds.build_cache_manifest(**(fields | changes))


def write_cache(directory, num_samples=3, **changes):
    """Write a complete cache in shards of two; return its shards."""
    manifest = manifest_of(num_samples, **changes)
    ds.write_manifest(directory, {**manifest, "complete": False})
    starts = range(0, num_samples, 2)
    shards = [shard_of(min(2, num_samples - start), seed=start) for start in starts]
    for index, shard in enumerate(shards):
        ds.write_shard(directory, index, shard)
    ds.write_manifest(directory, {**manifest, "complete": True})
    return shards


def same(read, written):
    return read.keys() == written.keys() and all(torch.equal(read[key], written[key]) for key in written)


def row(shard, index):
    return {key: values[index] for key, values in shard.items()}
