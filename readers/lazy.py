"""Bulk work: lazy views of a store's columns, on one machine or on a cluster, and counts of its tokens."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from dspark_store.format.schema import COLUMNS, IDS, LAST, LAYERS, MASK
from dspark_store.format.storage import Storage
from dspark_store.readers.cache import Cache
from dspark_store.readers.fetch import Verify

if TYPE_CHECKING:
    import dask.array as da
    import xarray as xr

_BLOCK_BYTES = 128 * 1024 * 1024


def dask_column(cache: Cache, column: str) -> da.Array:
    """Return a column as a lazy dask array of what the reader gives: pad token id, 0 and zeros past a sample's length.

    Ids and mask are int64; bfloat16 states come as float32, which holds each of them exactly, others as they are. A
    block is some rows of one shard, of one layer, at most about 128 MiB. Blocks are read where they are computed, so
    the workers of a cluster need the store's path. ValueError for an unknown column or a store without layer names.
    """
    import dask.array as da

    if column not in COLUMNS:
        raise ValueError(f"column {column!r} is unknown; choose from {', '.join(COLUMNS)}")
    schema = cache.schema
    tokens = column in (IDS, MASK)
    layers = schema.num_layers if column == LAYERS else 1
    dtype = np.dtype(np.int64) if tokens else np.dtype(np.float16 if schema.dtype.name == "fp16" else np.float32)
    row_bytes = schema.seq_length * (1 if tokens else schema.hidden_size) * dtype.itemsize
    rows = _row_chunks(len(cache), schema.shard_size, max(1, _BLOCK_BYTES // row_bytes))
    chunks: tuple[tuple[int, ...], ...] = (rows, (schema.seq_length,))
    if not tokens:
        chunks = (*chunks, (schema.hidden_size,) * layers)
    view: da.Array = da.map_blocks(  # type: ignore[no-untyped-call] # untyped in dask
        _read_block,
        chunks=chunks,
        dtype=dtype,
        meta=np.empty((0,) * len(chunks), dtype),
        name=f"dspark-store-{cache.record.store_id}-{column}-{len(cache)}",
        storage=cache.storage,
        column=column,
        store_id=cache.record.store_id,
        verify=cache.verify,
    )
    return view


def labelled_columns(cache: Cache) -> xr.Dataset:
    """Return the columns of `dask_column` with named dimensions: sample, position, layer and feature.

    ``target_hidden_states`` is (N, S, K, H); layer ids and the samples' lengths are coordinates. Needs xarray and dask.
    """
    import dask.array as da
    import xarray as xr

    width, flat = cache.schema.hidden_size, cache.dask(LAYERS)
    layers = [flat[..., slot * width : (slot + 1) * width] for slot in range(cache.schema.num_layers)]
    dims = ("sample", "position", "feature")
    columns: dict[str, Any] = {name: (dims[:2], cache.dask(name)) for name in (IDS, MASK)}
    columns[LAYERS] = ("sample", "position", "layer", "feature"), da.stack(layers, axis=2)  # type: ignore[no-untyped-call] # untyped in dask
    columns[LAST] = dims, cache.dask(LAST)
    return xr.Dataset(columns, {"layer": list(cache.layer_ids), "length": ("sample", cache.lengths)})


class DraftVocabulary(NamedTuple):
    """A draft's part of the target's vocabulary, ids ascending, in the form of EAGLE-3.

    ``d2t`` (size,) int64: draft id i is target id ``i + d2t[i]``; ``t2d`` (V,) bool: whether the draft has a target id;
    ``coverage``: the part of the store's supervised tokens that the draft has.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor
    coverage: float


def token_counts(cache: Cache, *, supervised: bool) -> np.ndarray:
    """See `Cache.token_counts`; an id past the end of the target's vocabulary makes it longer."""
    vocabulary = cache.manifest.get("target_vocab_size")
    counts = np.zeros(vocabulary if isinstance(vocabulary, int) else 0, np.int64)
    at_once = max(1, _BLOCK_BYTES // (32 * cache.schema.seq_length))
    for first in range(0, len(cache), at_once):
        rows = range(first, min(first + at_once, len(cache)))
        lengths = cache.lengths[rows.start : rows.stop]
        longest = int(lengths.max())
        if not longest:
            continue
        batch = cache.read(rows, columns=(IDS, MASK) if supervised else (IDS,), positions=slice(0, longest))
        counted = batch[MASK].numpy() > 0 if supervised else np.arange(longest) < lengths[:, None]
        found = np.bincount(batch[IDS].numpy()[counted], minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    return counts


def draft_vocabulary(cache: Cache, size: int) -> DraftVocabulary:
    """See `Cache.draft_vocabulary`; of ids that occur equally often the lower ones are taken."""
    counts = token_counts(cache, supervised=True)
    if not 1 <= size <= len(counts):
        raise ValueError(f"size of a draft vocabulary must be between 1 and the target's {len(counts)}, got {size}")
    ids = np.sort(np.argsort(-counts, kind="stable")[:size])
    t2d = torch.zeros(len(counts), dtype=torch.bool)
    t2d[ids] = True
    return DraftVocabulary(
        torch.from_numpy(ids - np.arange(size)), t2d, float(counts[ids].sum() / max(1, counts.sum()))
    )


def _row_chunks(samples: int, shard_size: int, most: int) -> tuple[int, ...]:
    """Split every shard into equal runs of at most ``most`` rows."""
    chunks: list[int] = []
    for first in range(0, samples, shard_size):
        count = min(shard_size, samples - first)
        parts = math.ceil(count / most)
        chunks += [count * (part + 1) // parts - count * part // parts for part in range(parts)]
    return tuple(chunks)


def _read_block(
    *, storage: Storage, column: str, store_id: str, verify: Verify, block_info: dict[Any, dict[str, Any]] | None = None
) -> np.ndarray:
    location = (block_info or {})[None]["array-location"]
    cache = _opened(storage, store_id, verify)
    slot = location[2][0] // cache.schema.hidden_size if column == LAYERS else 0
    layers = [cache.layer_ids[slot]] if column == LAYERS else None
    values = cache.read(range(*location[0]), columns=(column,), layers=layers)[column]
    return (values.float() if values.dtype is torch.bfloat16 else values).numpy()


@lru_cache(maxsize=8)
def _opened(storage: Storage, store_id: str, verify: Verify) -> Cache:
    """Open a store once a process."""
    cache = Cache(storage, allow_incomplete=True, verify=verify)
    if cache.record.store_id != store_id:
        raise ValueError(f"{storage} holds another store now than when the dask array was made")
    return cache
