"""The interface of NeMo Automodel's DSpark offline cache, on this format: its writing half and its manifest.

Names, signatures and error keywords are theirs, so that a script written for that module runs with its import line
changed. Unlike a precompute, these calls may come in any order: shards and weights before the manifest, a manifest
again with another ``complete``. The store becomes readable once it is declared complete and every shard is there.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from types import MappingProxyType
from typing import Protocol, cast

import numpy as np
import torch

from dspark_store.format.dtypes import CACHE_DTYPES, cache_dtype, cache_dtype_of
from dspark_store.format.grid import default_chunk_tokens
from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.ledger import state_ledger, token_ledger
from dspark_store.format.manifest import (
    FORMAT_VERSION,
    PEER_DEFAULTS,
    StoreRecord,
    identity_digest,
    mismatch_fields,
    stored_manifest,
)
from dspark_store.format.metadata import ROOT_KEY, has_store, read_record, write_metadata
from dspark_store.format.schema import COLUMNS, IDS, LAST, LAYERS, MASK, StoreSchema
from dspark_store.format.storage import LocalStorage, Storage
from dspark_store.format.token_shards import TokenRows
from dspark_store.writers.pipeline import EncodePipeline
from dspark_store.writers.publish import complete_store, settle_tokens
from dspark_store.writers.states import StateShardWriter
from dspark_store.writers.tokens import write_token_shard
from dspark_store.writers.weights import write_weights

CACHE_KEYS = COLUMNS
DTYPE_MAP = MappingProxyType({name: dtype.torch_dtype for name, dtype in CACHE_DTYPES.items()})
_CODEC = "default"
_LARGEST_ID = 2**31 - 1
_BUFFER_BYTES = 256 * 1024 * 1024

type PathText = str | PathLike[str]


class TargetBatch(Protocol):
    """One captured batch: ids and mask (B, S), states (B, S, K*H) and (B, S, H)."""

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    target_hidden_states: torch.Tensor
    target_last_hidden_states: torch.Tensor


class HasWeight(Protocol):
    """A module, or whatever else has a ``weight``."""

    weight: torch.Tensor


def compute_batch_cache(target_batch: TargetBatch, cache_dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return a batch's four cache keys on the CPU: ids and mask as int64, states in ``cache_dtype``."""
    integers = {name: getattr(target_batch, name).to(torch.long).cpu() for name in (IDS, MASK)}
    return integers | {name: getattr(target_batch, name).to(cache_dtype).cpu() for name in (LAYERS, LAST)}


def manifest_mismatch_fields(recorded: Mapping[str, JsonValue], manifest: Mapping[str, JsonValue]) -> list[str]:
    """Return the sorted fields in which two manifests describe different stores.

    Bookkeeping never counts, nor do the path of the data and the name of the target where a manifest of our own tells
    their content; between two manifests of these fields they do, as upstream.
    """
    return mismatch_fields(recorded, manifest)


def manifest_path(cache_dir: PathText) -> str:
    """Return the path of the file that holds the manifest: the group's ``zarr.json``."""
    return str(LocalStorage(cache_dir).path(ROOT_KEY))


def shard_path(cache_dir: PathText, shard_index: int) -> str:
    """Return the path of the ledger row that commits a shard; a shard's data is one object a column and layer."""
    return str(LocalStorage(cache_dir).path(f"ledger/states/c.{shard_index}.0.0"))


def existing_shard_indices(cache_dir: PathText) -> set[int]:
    """Return the committed shards; empty when there is no store."""
    storage = LocalStorage(cache_dir)
    if not has_store(storage):
        return set()
    return set(state_ledger(storage, read_record(storage).schema).committed())


def ensure_manifest_complete(manifest: Mapping[str, JsonValue], cache_dir: PathText) -> None:
    """Raise ValueError (``incomplete``) unless ``complete`` is absent or literally true."""
    if manifest.get("complete", True) is not True:
        raise ValueError(
            f"cache at {cache_dir} is incomplete (its precompute was interrupted or still runs): "
            "run the precompute again with --resume to finish it"
        )


def read_manifest(cache_dir: PathText, allow_incomplete: bool = False) -> dict[str, JsonValue]:
    """Return the manifest with its bookkeeping fields; what an older one lacks has its default.

    FileNotFoundError (``manifest not found``); ValueError (``format_version``, or ``incomplete`` unless allowed).
    """
    record = read_record(LocalStorage(cache_dir))
    if not record.manifest:
        raise FileNotFoundError(f"manifest not found: {cache_dir} has shards or weights, but no manifest yet")
    bookkeeping = {"format_version": FORMAT_VERSION, "complete": record.declared_complete}
    manifest = {**PEER_DEFAULTS, **record.manifest, **bookkeeping}
    if not allow_incomplete:
        ensure_manifest_complete(manifest, cache_dir)
    return manifest


def write_manifest(cache_dir: PathText, manifest: Mapping[str, JsonValue]) -> str:
    """Write or rewrite a store's manifest; one without ``complete`` counts as complete.

    The manifest settles the number of samples. ValueError when it contradicts shards that are already there.
    """
    storage = LocalStorage(cache_dir)
    if manifest.get("format_version", FORMAT_VERSION) != FORMAT_VERSION:
        raise ValueError(f"format_version must be {FORMAT_VERSION}, got {manifest['format_version']!r}")
    record = _record_for_manifest(storage, stored_manifest(manifest))
    record = replace(record, declared_complete=manifest.get("complete", True) is True)
    _write_growing(storage, record)
    return manifest_path(cache_dir)


def write_target_weights(cache_dir: PathText, embed_tokens: HasWeight, lm_head: HasWeight, dtype: torch.dtype) -> str:
    """Write the target's embedding and head in ``dtype``; a head equal to the embedding is stored once.

    Returns the path of the group that holds them. ValueError when a module has no ``.weight``.
    """
    embed, head = getattr(embed_tokens, "weight", None), getattr(lm_head, "weight", None)
    if embed is None:
        raise ValueError("the target's input embeddings have no .weight")
    if head is None:
        raise ValueError("the target's output embeddings (lm_head) have no .weight")
    storage = LocalStorage(cache_dir)
    record = _existing(storage)
    if record is None:
        record = StoreRecord(secrets.token_hex(16), _provisional_schema(int(embed.shape[1]), dtype))
    if record.schema.dtype.torch_dtype is not dtype:
        raise ValueError(f"weights are {dtype}, the cache is {record.schema.dtype.torch_dtype}")
    tied = embed is head or (embed.shape == head.shape and torch.equal(embed, head))
    record = write_weights(storage, record, embed, head, tied=tied)
    _write_growing(storage, record)
    return str(storage.path("target"))


def write_shard(
    cache_dir: PathText,
    shard_index: int,
    samples: Mapping[str, torch.Tensor],
    lengths: Sequence[int] | None = None,
) -> str:
    """Write one shard of n samples: the four cache keys with first axis n, and their true lengths.

    Without ``lengths`` every row is stored whole, padding included. The first shard of a store without a manifest
    settles R, S, H, K and the dtype. Returns `shard_path`. ValueError (``missing required``, or a shape that does not
    fit).
    """
    missing = [name for name in CACHE_KEYS if name not in samples]
    if missing:
        raise ValueError(f"shard {shard_index} is missing required fields: {', '.join(missing)}")
    if shard_index < 0:
        raise ValueError(f"shard_index must be >= 0, got {shard_index}")
    for name in (IDS, MASK):
        if samples[name].is_floating_point() or (samples[name].dtype is torch.bool and name == IDS):
            raise ValueError(f"{name} of shard {shard_index} must be integers, got {samples[name].dtype}")
    if int(samples[IDS].max()) > _LARGEST_ID:
        raise ValueError(f"input_ids of shard {shard_index} go up to {int(samples[IDS].max())}, above {_LARGEST_ID}")
    storage = LocalStorage(cache_dir)
    record = _existing(storage)
    if record is None or not _has_shards(storage, record):
        record = _fit_schema(record, samples)
        write_metadata(storage, record)
    _check_shapes(record.schema, shard_index, samples)
    rows = len(samples[IDS])
    sizes = [record.schema.seq_length] * rows if lengths is None else [int(length) for length in lengths]
    if len(sizes) != rows or any(not 0 <= size <= record.schema.seq_length for size in sizes):
        raise ValueError(f"lengths of shard {shard_index} must be {rows} numbers in 0..{record.schema.seq_length}")
    _check_tokens(shard_index, samples, sizes)
    record = _retract(storage, record, shard_index)
    _store_shard(storage, record, shard_index, samples, sizes)
    if record.declared_complete:
        _finish_if_whole(storage, record)
    return shard_path(cache_dir, shard_index)


def _store_shard(
    storage: Storage, record: StoreRecord, shard: int, samples: Mapping[str, torch.Tensor], sizes: Sequence[int]
) -> None:
    schema = record.schema
    ids = samples[IDS].to(torch.int32).cpu().numpy()
    masks = samples[MASK].to(torch.uint8).cpu().numpy()
    rows = TokenRows(
        [np.ascontiguousarray(row[:size]) for row, size in zip(ids, sizes, strict=True)],
        [np.ascontiguousarray(row[:size]) for row, size in zip(masks, sizes, strict=True)],
    )
    layers = samples[LAYERS].cpu().reshape(*ids.shape, schema.num_layers, schema.hidden_size)
    last = samples[LAST].cpu()
    same = [slot for slot in range(schema.num_layers) if torch.equal(layers[:, :, slot], last)]
    with EncodePipeline(1, _BUFFER_BYTES) as pipeline:
        writer = StateShardWriter(
            storage,
            record,
            shard,
            rows=len(sizes),
            tokens=rows.digest,
            pipeline=pipeline,
            shared_slot=same[-1] if same else None,
        )
        try:
            for row, size in enumerate(sizes):
                writer.add(row, list(layers[row, :size].unbind(1)), last[row, :size])
            write_token_shard(storage, record, shard, rows, cursor=shard * schema.shard_size + len(sizes))
            writer.commit()
        except BaseException:
            writer.abort()
            raise


def _existing(storage: Storage) -> StoreRecord | None:
    if not has_store(storage):
        return None
    record = read_record(storage)
    if record.copied_from is not None:
        raise ValueError(
            f"{storage} is a copy of another store, which nothing is written to: write to that one, and copy it again"
        )
    return record


def _has_shards(storage: Storage, record: StoreRecord) -> bool:
    return bool(state_ledger(storage, record.schema).committed())


def _provisional_schema(hidden_size: int, dtype: torch.dtype) -> StoreSchema:
    return StoreSchema(0, 1, 1, hidden_size, 1, (), cache_dtype_of(dtype), _CODEC, 1)


def _fit_schema(record: StoreRecord | None, samples: Mapping[str, torch.Tensor]) -> StoreRecord:
    """Return the record whose schema the first shard settles; the one of a manifest stands."""
    if record is not None and record.manifest:
        return record
    rows, seq, width = samples[LAST].shape
    dtype = cache_dtype_of(samples[LAST].dtype)
    tokens = default_chunk_tokens(width, dtype.itemsize, seq, compressed=True)
    layers = samples[LAYERS].shape[2] // width
    schema = StoreSchema(0, rows, seq, width, layers, (), dtype, _CODEC, tokens)
    return StoreRecord(secrets.token_hex(16), schema) if record is None else replace(record, schema=schema)


def _check_shapes(schema: StoreSchema, shard: int, samples: Mapping[str, torch.Tensor]) -> None:
    rows = len(samples[IDS])
    seq, width = schema.seq_length, schema.hidden_size
    shapes = {
        IDS: (rows, seq),
        MASK: (rows, seq),
        LAYERS: (rows, seq, schema.num_layers * width),
        LAST: (rows, seq, width),
    }
    if not 1 <= rows <= schema.shard_size:
        raise ValueError(f"shard {shard} has {rows} samples, expected 1 to {schema.shard_size}")
    for name, shape in shapes.items():
        if tuple(samples[name].shape) != shape:
            raise ValueError(f"{name} of shard {shard} has shape {tuple(samples[name].shape)}, expected {shape}")
    for name in (LAYERS, LAST):
        if samples[name].dtype is not schema.dtype.torch_dtype:
            raise ValueError(f"{name} of shard {shard} is {samples[name].dtype}, the store is {schema.dtype.name}")


def _check_tokens(shard: int, samples: Mapping[str, torch.Tensor], sizes: Sequence[int]) -> None:
    """Refuse ids below 0 and masks other than 0 and 1 within the rows' lengths: the columns' fill values are such."""
    valid = torch.arange(samples[IDS].shape[1]) < torch.tensor(sizes).unsqueeze(1)
    ids, mask = samples[IDS].cpu()[valid], samples[MASK].cpu()[valid]
    if bool((ids < 0).any()):
        raise ValueError(f"{IDS} of shard {shard} holds {int(ids.min())}, expected ids >= 0")
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(f"{MASK} of shard {shard} holds values other than 0 and 1")


def _record_for_manifest(storage: Storage, manifest: Mapping[str, JsonValue]) -> StoreRecord:
    """Return the record that a manifest gives, in agreement with the shards that are already there."""
    number = cast("Mapping[str, int]", manifest)
    if manifest.get("state_dtype") is not None:
        raise ValueError(
            f"state_dtype {manifest['state_dtype']}: such states are made by a precompute, or of a finished store by "
            "dspark-store rechunk --dtype, and not shard by shard"
        )
    dtype = cache_dtype(str(manifest["dtype"]))
    width, seq = number["hidden_size"], number["seq_length"]
    layer_ids = tuple(cast("Sequence[int]", manifest["target_layer_ids"]))
    tokens = default_chunk_tokens(width, dtype.itemsize, seq, compressed=True)
    schema = StoreSchema(
        number["num_samples"], number["shard_size"], seq, width, len(layer_ids), layer_ids, dtype, _CODEC, tokens
    )
    schema = replace(schema, mantissa_bits=cast("int | None", manifest.get("mantissa_bits")))
    record = _existing(storage)
    if record is None:
        return StoreRecord(identity_digest(manifest), schema, manifest=manifest)
    if not _has_shards(storage, record):
        keeps_weights = record.schema.dtype == dtype and record.schema.hidden_size == width
        weights = record.weights if keeps_weights else {}
        return StoreRecord(
            identity_digest(manifest), schema, manifest=manifest, weights=weights, checksums=record.checksums
        )
    written = record.schema
    shard_size = written.shard_size if schema.num_samples <= written.shard_size else schema.shard_size
    named = {**written.layout(), "num_samples": schema.num_samples}
    named["layer_ids"] = named["layer_ids"] or list(layer_ids)
    expected = replace(schema, shard_size=shard_size, codec=written.codec, chunk_tokens=written.chunk_tokens).layout()
    different = [name for name, value in expected.items() if named[name] != value]
    if different:
        raise ValueError(f"manifest does not match the shards of {storage} in: {', '.join(sorted(different))}")
    merged = replace(written, num_samples=schema.num_samples, layer_ids=written.layer_ids or layer_ids)
    return replace(record, schema=merged, manifest=manifest)


def _write_growing(storage: Storage, record: StoreRecord) -> None:
    """Write the metadata of a store that is not (or no longer) complete, and complete it when it is whole."""
    record = _growing(record)
    write_metadata(storage, record)
    if record.declared_complete:
        _finish_if_whole(storage, record)


def _finish_if_whole(storage: Storage, record: StoreRecord) -> None:
    shards = list(range(record.schema.tokens.num_shards))
    ledger = token_ledger(storage)
    if not shards or ledger.committed() != shards or state_ledger(storage, record.schema).committed() != shards:
        return
    if sum(int(ledger.row(shard)[2, 1]) for shard in shards) != record.schema.num_samples:
        return
    complete_store(storage, settle_tokens(storage, record))


def _retract(storage: Storage, record: StoreRecord, shard: int) -> StoreRecord:
    """Make room for a shard that is written again: it is uncommitted before its objects are touched."""
    if record.phase != "tokens":
        record = _growing(record)
        write_metadata(storage, record)
    state_ledger(storage, record.schema).retract(shard)
    token_ledger(storage).retract(shard)
    return record


def _growing(record: StoreRecord) -> StoreRecord:
    kept = {path: digest for path, digest in record.checksums.items() if path in record.weights}
    return replace(record, phase="tokens", checksums=kept)
