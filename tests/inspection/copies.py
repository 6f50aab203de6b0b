"""A store and its copy side by side: what must be equal in both, to our reader and to stock zarr-python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import zarr

from dspark_store import open_cache
from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.metadata import read_metadata
from dspark_store.format.schema import COLUMNS, IDS, LAST, LAYERS, MASK
from dspark_store.format.storage import LocalStorage
from dspark_store.inspection.copy_plan import CopySettings
from dspark_store.readers.cache import Cache
from dspark_store.readers.verify import verify_store
from tests.stores import same_bits

MANIFEST: dict[str, JsonValue] = {
    "target_model": "a model",
    "num_hidden_layers": 6,
    "shard_size": 3,
    "target_layer_ids": [2, -1, 5],
    "target_hidden_dim": 24,
    "batch_size": 2,
    "pad_token_id": 5,
    "codec": "default",
    "chunk_tokens": 8,
}
"""What `tests.stores.build_store` makes, as a precompute would say it."""

OTHER = CopySettings(codec="fast", chunk_tokens=5, shard_size=2)


def assert_copied(source: Path, copy: Path, layers: Sequence[int] | None = None) -> Cache:
    """Check every value of a copy, what it says of its target, and its objects; return it."""
    old, new = open_cache(source), open_cache(copy)
    assert verify_store(new) == []
    for name in ("lengths", "supervised", "status", "source"):
        assert np.array_equal(getattr(old, name), getattr(new, name)), name
    assert np.array_equal(old.index.digest, new.index.digest)
    assert new.sources == old.sources
    rows = range(len(old))
    before, after = old.read(rows, layers=layers, layout="stacked"), new.read(rows, layout="stacked")
    assert (before[IDS].tolist(), before[MASK].tolist()) == (after[IDS].tolist(), after[MASK].tolist())
    assert same_bits(before[LAYERS], after[LAYERS])
    assert same_bits(before[LAST], after[LAST])
    for field in ("target_config", "head", "producers"):
        assert getattr(old.record, field) == getattr(new.record, field)
    assert {*old.record.weights} == {*new.record.weights}
    if old.record.weights:
        assert same_bits(old.weights().embed, new.weights().embed)
        assert same_bits(old.weights().head, new.weights().head)
    return new


def assert_zarr_agrees(source: Path, copy: Path) -> None:
    """Check with zarr-python alone that every value of every column is the same, fill values included."""
    for column in COLUMNS:
        old, new = (np.asarray(zarr.open_array(path / column, mode="r")[...]) for path in (source, copy))
        assert old.dtype == new.dtype
        assert old.tobytes() == new.tobytes(), column


def contents(root: Path) -> dict[str, bytes]:
    """Return every file of a store by path."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def phase_of(root: Path) -> str:
    """Return how far a store is."""
    return read_metadata(LocalStorage(root)).record.phase
