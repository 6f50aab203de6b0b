"""dspark-store: a columnar store, on Zarr v3, for what a frozen language model computes over a corpus.

`open_cache` opens a store for reading and `CacheLoader` gives batches of it for training; ``dspark-store precompute``
writes one, and `create_store` takes states from any engine. Most other names are those of NeMo Automodel's DSpark
offline cache, so that a script written for it runs with its import line changed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark_store.compat.automodel import (
        CACHE_KEYS,
        DTYPE_MAP,
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
    from dspark_store.compat.dataset import (
        CachedDSparkDataset,
        build_cached_dspark_dataloader,
        read_target_weight_modules,
    )
    from dspark_store.format.damage import DamagedStoreError, Part, Problem
    from dspark_store.format.int8 import split_codes
    from dspark_store.format.manifest import build_cache_manifest
    from dspark_store.precompute.engine import convert_layer_ids, create_store, join_store
    from dspark_store.precompute.pushed import StoreWriter
    from dspark_store.readers.cache import Cache, open_cache
    from dspark_store.readers.index import TargetWeights, read_weights
    from dspark_store.readers.loader import CacheLoader
    from dspark_store.readers.verify import verify_store
    from dspark_store.sources.identity import chat_template_sha256 as tokenizer_chat_template_sha256

__version__ = "0.1.0"

__all__ = [
    "CACHE_KEYS",
    "DTYPE_MAP",
    "Cache",
    "CacheLoader",
    "CachedDSparkDataset",
    "DamagedStoreError",
    "Part",
    "Problem",
    "StoreWriter",
    "TargetWeights",
    "build_cache_manifest",
    "build_cached_dspark_dataloader",
    "compute_batch_cache",
    "convert_layer_ids",
    "create_store",
    "ensure_manifest_complete",
    "existing_shard_indices",
    "join_store",
    "manifest_mismatch_fields",
    "manifest_path",
    "open_cache",
    "read_manifest",
    "read_target_weight_modules",
    "read_weights",
    "shard_path",
    "split_codes",
    "tokenizer_chat_template_sha256",
    "verify_store",
    "write_manifest",
    "write_shard",
    "write_target_weights",
]

_MODULES = {
    "Cache": "readers.cache",
    "CacheLoader": "readers.loader",
    "CachedDSparkDataset": "compat.dataset",
    "DamagedStoreError": "format.damage",
    "Part": "format.damage",
    "Problem": "format.damage",
    "StoreWriter": "precompute.pushed",
    "TargetWeights": "readers.index",
    "build_cache_manifest": "format.manifest",
    "build_cached_dspark_dataloader": "compat.dataset",
    "convert_layer_ids": "precompute.engine",
    "create_store": "precompute.engine",
    "join_store": "precompute.engine",
    "open_cache": "readers.cache",
    "read_target_weight_modules": "compat.dataset",
    "read_weights": "readers.index",
    "split_codes": "format.int8",
    "tokenizer_chat_template_sha256": "sources.identity",
    "verify_store": "readers.verify",
}
"""Where a name is, if not in `compat.automodel`. Modules are imported with the first use of a name: torch is slow."""


def __getattr__(name: str) -> Any:  # noqa: ANN401 # whatever the name is
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULES.get(name, 'compat.automodel')}")
    value = getattr(module, "chat_template_sha256" if name == "tokenizer_chat_template_sha256" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
