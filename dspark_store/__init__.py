"""dspark-store: a columnar store, on Zarr v3, for what a frozen language model computes over a corpus.

`open_cache` reads a store, ``python -m dspark_store.precompute`` writes one. The other names are those of NeMo
Automodel's DSpark offline cache, so that a script written for it runs with its import line changed.
"""

from dspark_store.automodel import (
    CACHE_KEYS,
    DTYPE_MAP,
    build_cache_manifest,
    compute_batch_cache,
    ensure_manifest_complete,
    existing_shard_indices,
    manifest_mismatch_fields,
    manifest_path,
    read_manifest,
    shard_path,
    write_manifest,
    write_shard,
    write_target_weights,
)
from dspark_store.dataset import CachedDSparkDataset, build_cached_dspark_dataloader, read_target_weight_modules
from dspark_store.format.damage import DamagedStoreError
from dspark_store.readers import Cache, CacheLoader, Problem, TargetWeights, open_cache, read_weights, verify_store
from dspark_store.sources.identity import chat_template_sha256 as tokenizer_chat_template_sha256

__version__ = "0.1.0"

__all__ = [
    "CACHE_KEYS",
    "DTYPE_MAP",
    "Cache",
    "CacheLoader",
    "CachedDSparkDataset",
    "DamagedStoreError",
    "Problem",
    "TargetWeights",
    "build_cache_manifest",
    "build_cached_dspark_dataloader",
    "compute_batch_cache",
    "ensure_manifest_complete",
    "existing_shard_indices",
    "manifest_mismatch_fields",
    "manifest_path",
    "open_cache",
    "read_manifest",
    "read_target_weight_modules",
    "read_weights",
    "shard_path",
    "tokenizer_chat_template_sha256",
    "verify_store",
    "write_manifest",
    "write_shard",
    "write_target_weights",
]
