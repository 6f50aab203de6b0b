"""Small stores for tests: values from a formula, so that any test can say what must come back."""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch

from dspark_store.format.dtypes import cache_dtype
from dspark_store.format.int8 import AIMS, calibrate, dequantise, quantise
from dspark_store.format.manifest import ATTRIBUTE, StoreRecord, parse_record
from dspark_store.format.metadata import ROOT_KEY, node_key, record_nodes, write_metadata, write_root
from dspark_store.format.schema import StoreSchema
from dspark_store.format.storage import LocalStorage
from dspark_store.format.token_shards import TokenRows
from dspark_store.writers.pipeline import EncodePipeline
from dspark_store.writers.publish import complete_store, settle_tokens
from dspark_store.writers.states import StateShardWriter
from dspark_store.writers.tokens import write_token_shard
from dspark_store.writers.weights import write_weights

RAGGED = (1, 20, 7, 8, 9, 13, 20)
"""Lengths of seven samples: one token, the full length, and both sides of a chunk's end."""
PAD = 5
STORE_ID = "0123456789abcdef0123456789abcdef"


@dataclass(frozen=True)
class Sample:
    """What was written for one sample: ids and mask (length,), layers (K, length, H), last (length, H)."""

    ids: np.ndarray
    mask: np.ndarray
    layers: torch.Tensor
    last: torch.Tensor


@dataclass(frozen=True)
class BuiltStore:
    """A store on disk and what went into it. ``embed`` and ``head`` are (V, H) in the cache dtype."""

    path: Path
    record: StoreRecord
    samples: Sequence[Sample]
    embed: torch.Tensor
    head: torch.Tensor

    @property
    def storage(self) -> LocalStorage:
        return LocalStorage(self.path)

    @property
    def schema(self) -> StoreSchema:
        return self.record.schema


@dataclass(frozen=True)
class Shape:
    """The sizes of a store under test; S is no multiple of the chunk, N none of the shard."""

    seq_length: int = 20
    shard_size: int = 3
    chunk_tokens: int = 8
    hidden_size: int = 8
    layer_ids: tuple[int, ...] = (2, -1, 5)
    vocab: int = 19


def build_store(
    directory: Path,
    *,
    dtype: str = "bf16",
    codec: str = "default",
    lengths: Sequence[int] = RAGGED,
    shape: Shape = Shape(),
    until: Literal["tokens", "states", "complete"] = "complete",
    without_shards: Collection[int] = (),
    tied: bool = False,
    weights: bool = True,
    shared_last: bool = True,
    spoiled: int | None = None,
    sources: Sequence[str] = (),
    bias: bool = False,
    corpus: int = 0,
    target: int = 0,
    fields: Mapping[str, Any] | None = None,
) -> BuiltStore:
    """Write a store of ``len(lengths)`` samples.

    ``until`` ends it in an earlier phase, ``without_shards`` leaves states uncommitted (then it stays in the states
    phase); ``shared_last`` makes the last slot's states the last hidden states; ``spoiled`` names a sample whose
    states hold an infinity; ``sources`` are given to the samples in turn; ``bias`` gives the head one; another
    ``corpus`` or ``target`` is another run, with other tokens or other states; ``fields`` are fields of the
    `StoreRecord`. Of a store of codes, ``samples`` are the states as they are read.
    """
    schema = _schema(shape, dtype, codec, sources)
    torch_dtype = schema.dtype.torch_dtype
    manifest: dict[str, Any] = {"pad_token_id": PAD, **({"state_dtype": schema.int8} if schema.int8 else {})}
    record = replace(StoreRecord(STORE_ID, schema, manifest=manifest), **(fields or {}))
    samples = [
        make_sample(index + 50 * corpus, size, schema, shared_last, index == spoiled, target)
        for index, size in enumerate(lengths)
    ]
    embed = numbers(11 + 50 * target, (shape.vocab, shape.hidden_size)).to(torch_dtype)
    head = embed if tied else numbers(12 + 50 * target, (shape.vocab, shape.hidden_size)).to(torch_dtype)
    head_bias = numbers(13 + 50 * target, (shape.vocab,)).to(torch_dtype) if bias else None
    storage = LocalStorage(directory)
    shards = [samples[first : first + shape.shard_size] for first in range(0, len(samples), shape.shard_size)]
    with patch.object(os, "fsync"):  # most of the time, and no test cuts the power
        write_metadata(storage, record)
        for shard, members in enumerate(shards):
            numbered = range(shard * shape.shard_size, shard * shape.shard_size + len(members))
            origins = [number % len(sources) for number in numbered] if sources else []
            rows = replace(token_rows(members), sources=origins)
            write_token_shard(storage, record, shard, rows, cursor=100 * (shard + 1))
        if until == "tokens":
            return BuiltStore(directory, record, samples, embed, head)
        record = settle_tokens(storage, record)
        if weights:
            record = write_weights(storage, record, embed, head, head_bias, tied=tied)
            write_metadata(storage, record)
        if not record.schema.calibrated:
            record = replace(record, schema=calibrated(record.schema, samples))
            write_metadata(storage, record)
        for shard, members in enumerate(shards):
            if shard not in without_shards:
                write_states(storage, record, shard, members, shared_last=shared_last)
        if until == "complete" and not without_shards:
            record = complete_store(storage, record)
    if record.schema.int8 is not None:
        samples = [decoded_sample(sample, record.schema) for sample in samples]
    return BuiltStore(directory, record, samples, embed, head)


def calibrated(schema: StoreSchema, samples: Sequence[Sample]) -> StoreSchema:
    """Return the schema of a store of codes, calibrated on all samples."""
    states = [[*sample.layers, sample.last] for sample in samples]
    names = [item.name for item in schema.state_objects]
    aim, width = AIMS[str(schema.int8)], schema.hidden_size
    return schema.with_scales(
        {name: calibrate([row[at] for row in states], width, aim) for at, name in enumerate(names)}
    )


def decoded_sample(sample: Sample, schema: StoreSchema) -> Sample:
    """Return a sample as it is read from a store of codes."""
    states = torch.stack([*sample.layers, sample.last])
    for item, layer in zip(schema.state_objects, states, strict=True):
        scale = schema.scale(item.column, item.slot)
        dequantise(quantise(layer, scale)[0], scale.high_channels, layer)
    return replace(sample, layers=states[:-1], last=states[-1])


def _schema(shape: Shape, dtype: str, codec: str, sources: Sequence[str]) -> StoreSchema:
    return StoreSchema(
        num_samples=0,
        shard_size=shape.shard_size,
        seq_length=shape.seq_length,
        hidden_size=shape.hidden_size,
        num_layers=len(shape.layer_ids),
        layer_ids=shape.layer_ids,
        dtype=cache_dtype("bf16"),
        codec=codec,
        chunk_tokens=shape.chunk_tokens,
        sources=tuple(sources),
    ).stored_as(dtype)


def write_states(
    storage: LocalStorage,
    record: StoreRecord,
    shard: int,
    members: Sequence[Sample],
    *,
    shared_last: bool = True,
    threads: int = 1,
) -> None:
    """Write and commit the states of one shard."""
    with EncodePipeline(threads, 1 << 20) as pipeline:
        writer = StateShardWriter(
            storage,
            record,
            shard,
            rows=len(members),
            tokens=token_rows(members).digest,
            pipeline=pipeline,
            shared_slot=record.schema.num_layers - 1 if shared_last else None,
        )
        for row, sample in enumerate(members):
            writer.add(row, list(sample.layers), sample.last)
        writer.commit()


def token_rows(members: Sequence[Sample]) -> TokenRows:
    """Return a shard's tokens."""
    return TokenRows([sample.ids for sample in members], [sample.mask for sample in members])


def make_sample(
    index: int, length: int, schema: StoreSchema, shared_last: bool = True, spoiled: bool = False, target: int = 0
) -> Sample:
    """Return the sample number ``index``: every element follows from its place."""
    ids = ((np.arange(length) * 7 + index * 31) % 1000).astype(np.int32)
    mask = ((np.arange(length) + index) % 3 > 0).astype(np.uint8)
    dtype = schema.dtype.torch_dtype
    states = numbers(100 + 1000 * target + index, (schema.num_layers + 1, length, schema.hidden_size)).to(dtype)
    if spoiled and length:
        states[0, 0, 0] = float("inf")
    layers, last = states[:-1], states[-1]
    return Sample(ids, mask, layers, layers[-1] if shared_last else last)


def numbers(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return finite float32 numbers in -32..32 that look random, the same on every machine and release."""
    count = int(np.prod(shape))
    words = (np.arange(count, dtype=np.uint64) + np.uint64(seed * 1_000_003)) * np.uint64(0x9E3779B97F4A7C15)
    fractions = (words >> np.uint64(40)).astype(np.int64) - (1 << 23)
    return torch.from_numpy((fractions / (1 << 18)).astype(np.float32)).reshape(shape)


def bits(states: torch.Tensor) -> np.ndarray:
    """Return a tensor's bits, so that NaN and -0.0 compare as what they are."""
    width = states.dtype.itemsize
    return states.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[width]).numpy()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors have the same dtype, shape and bits."""
    return one.dtype == other.dtype and np.array_equal(bits(one), bits(other))


@dataclass(frozen=True)
class Padded:
    """What a reader must give for a built store's N samples: (N, S), (N, S), (N, K, S, H) and (N, S, H)."""

    ids: torch.Tensor
    mask: torch.Tensor
    layers: torch.Tensor
    last: torch.Tensor


def padded(store: BuiltStore, pad: int = PAD) -> Padded:
    """Return the whole store as a reader must give it."""
    schema, samples = store.schema, store.samples
    n, seq, width = len(samples), schema.seq_length, schema.hidden_size
    ids = torch.full((n, seq), pad, dtype=torch.int64)
    mask = torch.zeros((n, seq), dtype=torch.int64)
    layers = torch.zeros((n, schema.num_layers, seq, width), dtype=schema.dtype.torch_dtype)
    last = torch.zeros((n, seq, width), dtype=schema.dtype.torch_dtype)
    for row, sample in enumerate(samples):
        length = len(sample.ids)
        ids[row, :length] = torch.from_numpy(sample.ids).long()
        mask[row, :length] = torch.from_numpy(sample.mask).long()
        layers[row, :, :length] = sample.layers
        last[row, :length] = sample.last
    return Padded(ids, mask, layers, last)


def reseal(storage: LocalStorage) -> None:
    """Seal a store anew after its metadata was edited, as a tool that rewrites a column must."""
    root = json.loads(storage.read(ROOT_KEY))
    attributes = root["attributes"][ATTRIBUTE]
    paths = record_nodes(parse_record(attributes, "a test"))
    nodes = {path: json.loads(storage.read(node_key(path))) for path in paths}
    write_root(storage, attributes, nodes)


def flip(path: Path, place: int, bit: int = 0) -> None:
    """Flip one bit of a file in place."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(bytes(data))
