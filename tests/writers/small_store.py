"""A store of random states that is written in milliseconds, and its parts one at a time."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dspark_store.format.dtypes import cache_dtype
from dspark_store.format.int8 import LayerScale
from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.metadata import write_metadata
from dspark_store.format.schema import StoreSchema
from dspark_store.format.storage import LocalStorage, Storage
from dspark_store.format.token_shards import TokenRows
from dspark_store.writers.pipeline import EncodePipeline
from dspark_store.writers.publish import complete_store, settle_tokens
from dspark_store.writers.states import StateShardWriter
from dspark_store.writers.tokens import write_token_shard
from dspark_store.writers.weights import write_weights

SEQ_LENGTH, SHARD_SIZE, HIDDEN_SIZE, CHUNK_TOKENS = 16, 4, 8, 8
LAYER_IDS = (0, 1, 3)
SHARED_SLOT = 2
LENGTHS = (7, 16, 1, 12, 9, 16, 3, 5, 10, 2)
BUFFER_BYTES = 1 << 20
BLENDED = ("chats", "code", "papers")
ORIGINS = ((0, 1, 2, 1), (0, 2))

type States = tuple[list[torch.Tensor], torch.Tensor]


def small_record(
    store_id: str = "5ma11", *, shard_size: int = SHARD_SIZE, codec: str = "default", int8: str | None = None
) -> StoreRecord:
    """Return the record of a store that has not begun, of codes with the same scale in every layer where asked."""
    schema = StoreSchema(
        num_samples=0,
        shard_size=shard_size,
        seq_length=SEQ_LENGTH,
        hidden_size=HIDDEN_SIZE,
        num_layers=len(LAYER_IDS),
        layer_ids=LAYER_IDS,
        dtype=cache_dtype("bf16"),
        codec=codec,
        chunk_tokens=CHUNK_TOKENS,
        int8=int8,
        scales=(LayerScale(-16, tuple(range(HIDDEN_SIZE)), 0.02, 0.0),) * (len(LAYER_IDS) + 1) if int8 else (),
    )
    manifest: dict[str, JsonValue] = {"target_model": "small", "num_hidden_layers": 4, "pad_token_id": 3}
    manifest |= {"state_dtype": int8} if int8 else {}
    return StoreRecord(store_id, schema, manifest=manifest, target_config={"vocab_size": 40, "rms_norm_eps": 1e-06})


def random_tokens(lengths: Sequence[int], seed: int) -> TokenRows:
    """Return rows of random ids and masks."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, 1000, length).astype(np.int32) for length in lengths]
    return TokenRows(ids, [rng.integers(0, 2, length).astype(np.uint8) for length in lengths])


def random_states(length: int, seed: int) -> States:
    """Return one sample's layers and last hidden states; the layer in the shared slot is the last states."""
    generator = torch.Generator().manual_seed(seed)
    layers = [torch.randn(length, HIDDEN_SIZE, generator=generator) for _ in LAYER_IDS]
    return layers, layers[SHARED_SLOT]


def shards_of(lengths: Sequence[int], shard_size: int = SHARD_SIZE) -> list[Sequence[int]]:
    """Return the lengths of each shard's rows."""
    return [lengths[first : first + shard_size] for first in range(0, len(lengths), shard_size)]


def write_tokens(storage: Storage, record: StoreRecord, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> StoreRecord:
    """Write and settle the token phase; return the record of the states phase."""
    write_metadata(storage, record)
    for shard, part in enumerate(shards_of(lengths, record.schema.shard_size)):
        rows = random_tokens(part, seed + shard)
        write_token_shard(storage, record, shard, rows, cursor=shard * record.schema.shard_size + len(part))
    return settle_tokens(storage, record)


def write_states(
    storage: Storage,
    record: StoreRecord,
    shard: int,
    lengths: Sequence[int],
    pipeline: EncodePipeline,
    *,
    tokens: str,
    seed: int = 0,
    shared_slot: int | None = SHARED_SLOT,
) -> None:
    """Capture and commit one shard of random states."""
    options = {"rows": len(lengths), "tokens": tokens, "pipeline": pipeline, "shared_slot": shared_slot}
    writer = StateShardWriter(storage, record, shard, **options)  # type: ignore[arg-type] # each has its own type
    for row, length in enumerate(lengths):
        writer.add(row, *random_states(length, seed * 1000 + shard * 100 + row))
    writer.commit()


def write_small_store(
    root: Path,
    seed: int = 0,
    *,
    store_id: str = "5ma11",
    lengths: Sequence[int] = LENGTHS,
    vocab: int = 40,
    int8: str | None = None,
) -> Path:
    """Write a complete store whose values follow from ``seed``; return its folder."""
    storage = LocalStorage(root)
    record = write_tokens(storage, small_record(store_id, int8=int8), lengths, seed)
    generator = torch.Generator().manual_seed(seed)
    tables = [torch.randn(vocab, HIDDEN_SIZE, generator=generator) for _ in range(2)]
    record = write_weights(storage, record, *tables, tied=False)
    with EncodePipeline(2, BUFFER_BYTES) as pipeline:
        for shard, part in enumerate(shards_of(lengths)):
            tokens = random_tokens(part, seed + shard).digest
            write_states(storage, record, shard, part, pipeline, tokens=tokens, seed=seed)
    complete_store(storage, record)
    return root


def build_blended(root: Path) -> Path:
    """Write a store that was made from three sources, `BLENDED`; `ORIGINS` has the source of every row by shard."""
    storage = LocalStorage(root)
    record = replace(small_record(), schema=replace(small_record().schema, sources=BLENDED))
    write_metadata(storage, record)
    shards = [replace(random_tokens((9,) * len(part), shard), sources=part) for shard, part in enumerate(ORIGINS)]
    for shard, rows in enumerate(shards):
        write_token_shard(storage, record, shard, rows, cursor=0)
    record = settle_tokens(storage, record)
    with EncodePipeline(1, BUFFER_BYTES) as pipeline:
        for shard, rows in enumerate(shards):
            write_states(storage, record, shard, rows.lengths, pipeline, tokens=rows.digest)
    complete_store(storage, record)
    return root
