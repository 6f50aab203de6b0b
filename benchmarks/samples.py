"""Samples to measure on: real states out of a store, or synthetic ones, and stores written from them."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.costs import Elapsed, elapsed
from dspark_store import open_cache
from dspark_store.format.dtypes import CacheDtype, cache_dtype
from dspark_store.format.grid import default_chunk_tokens
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.metadata import write_metadata
from dspark_store.format.schema import LAYERS, StoreSchema
from dspark_store.format.storage import LocalStorage
from dspark_store.format.token_shards import TokenRows, read_token_shard
from dspark_store.writers.pipeline import EncodePipeline
from dspark_store.writers.publish import complete_store, settle_tokens
from dspark_store.writers.states import StateShardWriter
from dspark_store.writers.tokens import write_token_shard

BF16 = cache_dtype("bf16")


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of up to S positions and H features: every sample's length, and ``states``, which gives its K layers.

    Each layer of sample i is (length, H) in the cache dtype; the last one is also the last hidden state.
    """

    seq_length: int
    width: int
    layers: int
    dtype: CacheDtype
    lengths: tuple[int, ...]
    states: Callable[[int], Sequence[torch.Tensor]]

    @property
    def vector_bytes(self) -> int:
        """Bytes of one state."""
        return self.width * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Valid bytes of all distinct states, K vectors a token."""
        return sum(self.lengths) * self.layers * self.vector_bytes

    @property
    def ragged_bytes(self) -> int:
        """Bytes of the same samples as ragged bf16 rows of K + 1 vectors, ids and mask: what stored sizes are of."""
        return sum(self.lengths) * ((self.layers + 1) * self.width * BF16.itemsize + 5)

    @property
    def mean_bytes(self) -> float:
        """Valid bytes that a sample is in training, in the mean: K + 1 vectors a token."""
        return statistics.mean(self.lengths) * (self.layers + 1) * self.vector_bytes

    def first(self, count: int) -> Samples:
        """Return the first samples."""
        return replace(self, lengths=self.lengths[:count])

    def grouped(self, layers: int) -> Samples:
        """Return the same samples with each ``layers`` neighbouring layers as one of so many times the features.

        They are made once and kept in memory. ValueError when the layers do not fall into such groups.
        """
        if self.layers % layers:
            raise ValueError(f"{layers} layers per chunk do not divide the {self.layers} layers of the samples")
        made = [
            [torch.cat(list(states[at : at + layers]), dim=1) for at in range(0, self.layers, layers)]
            for states in map(self.states, range(len(self.lengths)))
        ]
        return replace(self, width=self.width * layers, layers=self.layers // layers, states=made.__getitem__)

    def schema(self, codec: str, chunk_tokens: int, shard_size: int) -> StoreSchema:
        """Return the schema of a store of these samples."""
        sizes = (len(self.lengths), shard_size, self.seq_length, self.width)
        return new_schema(*sizes, range(1, self.layers + 1), codec, dtype=self.dtype, chunk_tokens=chunk_tokens)


def new_schema(
    count: int,
    shard_size: int,
    seq_length: int,
    width: int,
    layer_ids: Sequence[int],
    codec: str,
    *,
    dtype: CacheDtype = BF16,
    chunk_tokens: int | None = None,
) -> StoreSchema:
    """Return the schema of a store, with the default chunks of its codec unless ``chunk_tokens`` is given."""
    tokens = chunk_tokens or default_chunk_tokens(width, dtype.itemsize, seq_length, compressed=codec != "none")
    ids = tuple(layer_ids)
    return StoreSchema(count, shard_size, seq_length, width, len(ids), ids, dtype, codec, tokens)


def synthetic_states(tokens: int, width: int, seed: int = 0) -> torch.Tensor:
    """Return (tokens, width) bfloat16 states, the same for the same seed.

    Real states have a few strong channels and about 2.7 bits of entropy in the high byte of a bfloat16; so have these:
    normal values under log-normal channel scales.
    """
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randn(width, generator=generator).mul_(0.35).exp_()
    scales[torch.randint(width, (max(1, width // 500),), generator=generator)] *= 30
    return (torch.randn(tokens, width, generator=generator) * scales).bfloat16()


def synthetic_samples(seq_length: int, width: int, layers: int, count: int, *, ragged: bool) -> Samples:
    """Return synthetic samples of full length, or of lengths evenly spread between one token and S."""
    generator = np.random.Generator(np.random.PCG64(0))
    spread = generator.permutation(count) * (seq_length - 1) // (count - 1) + 1
    lengths = tuple(int(length) for length in (spread if ragged else np.full(count, seq_length)))
    pool = [synthetic_states(seq_length, width, seed) for seed in range(layers + 2)]

    def states(sample: int) -> Sequence[torch.Tensor]:
        return [pool[(sample + layer) % len(pool)][: lengths[sample]] for layer in range(layers)]

    return Samples(seq_length, width, layers, BF16, lengths, states)


def stored_samples(
    store: Path, *, count: int | None = None, layers: int | None = None, nbytes: int | None = None
) -> Samples:
    """Return samples of a real store, in memory: at most ``count`` of them, of ``nbytes`` bytes of states in all.

    They are spread evenly over the store, with its last ``layers`` layers, or all of them.
    """
    cache = open_cache(store, allow_reduced_depth=True)
    chosen = cache.layer_ids[-layers:] if layers else cache.layer_ids
    limit = len(cache) if count is None else min(count, len(cache))
    if nbytes is not None:
        vector_bytes = cache.schema.hidden_size * cache.schema.dtype.itemsize
        mean = max(1.0, float(cache.lengths.mean())) * len(chosen) * vector_bytes
        limit = max(1, min(limit, int(nbytes / mean)))
    rows = np.linspace(0, len(cache) - 1, limit).round().astype(int).tolist()
    held: list[list[torch.Tensor]] = []
    for row in rows:
        item = cache.read(
            [row], columns=(LAYERS,), layers=chosen, positions=slice(0, int(cache.lengths[row])), layout="stacked"
        )
        held.append(list(item[LAYERS][0]))
    lengths = tuple(int(cache.lengths[row]) for row in rows)
    schema = cache.schema
    return Samples(schema.seq_length, schema.hidden_size, len(chosen), schema.dtype, lengths, held.__getitem__)


def write_samples(
    samples: Samples, schema: StoreSchema, place: Path, threads: int, *, buffer_bytes: int = 256 * 2**20
) -> Elapsed:
    """Write a complete store, each object to the disk; return the time that its states took."""
    storage, count = LocalStorage(place), len(samples.lengths)
    shards = [range(first, min(count, first + schema.shard_size)) for first in range(0, count, schema.shard_size)]
    record = StoreRecord("0" * 32, schema)
    tokens = [[np.arange(samples.lengths[sample], dtype=np.int32) for sample in members] for members in shards]
    record = write_tokens(storage, record, tokens)
    digests = [read_token_shard(storage, record, shard).digest for shard in range(len(shards))]

    def write_states() -> None:
        with EncodePipeline(threads, buffer_bytes) as pipeline, ThreadPoolExecutor(1) as thread:
            commit: Future[object] | None = None  # which runs behind the next shard, as in a capture
            for shard, digest in enumerate(digests):
                writer = _added(samples, storage, record, shard, digest, pipeline)
                if commit is not None:
                    commit.result()
                commit = thread.submit(writer.commit)
            if commit is not None:
                commit.result()

    time = elapsed(write_states)
    complete_store(storage, record)
    return time


def write_tokens(storage: LocalStorage, record: StoreRecord, shards: Iterable[Sequence[np.ndarray]]) -> StoreRecord:
    """Write a new store's tokens, the ids of each sample of each shard, and settle them."""
    write_metadata(storage, record)
    for shard, ids in enumerate(shards):
        rows = TokenRows(ids, [np.ones(len(row), np.uint8) for row in ids])
        write_token_shard(storage, record, shard, rows, cursor=shard + 1)
    return settle_tokens(storage, record)


def _added(
    samples: Samples, storage: LocalStorage, record: StoreRecord, shard: int, tokens: str, pipeline: EncodePipeline
) -> StateShardWriter:
    """Return the writer of a shard that has all of its states, the last layer as the last hidden state as well."""
    members, last_slot = record.schema.tokens.rows(shard), record.schema.num_layers - 1
    writer = StateShardWriter(
        storage, record, shard, rows=len(members), tokens=tokens, pipeline=pipeline, shared_slot=last_slot
    )
    for row, sample in enumerate(members):
        layers = samples.states(sample)
        writer.add(row, layers, layers[-1])
    return writer


def unsynced() -> AbstractContextManager[object]:
    """Leave out every fsync meanwhile, where writing is not what is measured."""
    return patch.object(os, "fsync")
