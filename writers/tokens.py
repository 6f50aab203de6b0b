"""Writing token shards: the objects of ids and masks, and the ledger row that commits them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from dspark_store.format.codecs import EncodedChunk
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.ledger import token_ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import IDS, MASK, SHARD_SOURCES, SOURCE_FILL, StoreSchema, object_key
from dspark_store.format.shard import ObjectLabel, ObjectRecord, Place, ShardWriter
from dspark_store.format.storage import Storage
from dspark_store.format.token_shards import (
    TOKEN_VALUES,
    TokenRows,
    read_rows,
    read_shard_sources,
    sources_key,
    sources_place,
)


def write_token_shard(
    storage: Storage, record: StoreRecord, shard: int, rows: TokenRows, cursor: int, *, read_back: bool = False
) -> None:
    """Write and commit one shard of tokens.

    ``cursor`` is where the source goes on after it. With ``read_back``, what was written is read from the disk before
    it is committed, DamagedStoreError where it is something else. FileExistsError when the shard is committed already,
    ValueError when the rows' sources are not those of a store with several.
    """
    schema = record.schema
    if schema.sources:
        _check_sources(schema, rows)
    digest = rows.digest
    records = [
        _write_column(storage, schema, IDS, shard, rows.ids, record.store_id, digest),
        _write_column(storage, schema, MASK, shard, rows.masks, record.store_id, digest),
        ObjectRecord(cursor, len(rows)),
    ]
    if schema.sources:
        write_shard_sources(storage, record, shard, rows.sources, digest)
    if read_back:
        _check_written(storage, record, shard, rows, records)
    token_ledger(storage).publish(shard, records)


def _check_written(
    storage: Storage, record: StoreRecord, shard: int, rows: TokenRows, records: Sequence[ObjectRecord]
) -> None:
    found = read_rows(storage, record, shard, records)
    sources = read_shard_sources(storage, record, shard, rows) if record.schema.sources else rows.sources
    if found.digests() != rows.digests() or list(sources) != list(rows.sources):
        raise DamagedStoreError(f"tokens of shard {shard} of {storage} read back other than they were written")


def _check_sources(schema: StoreSchema, rows: TokenRows) -> None:
    if len(rows.sources) != len(rows) or not all(0 <= source < len(schema.sources) for source in rows.sources):
        raise ValueError(
            f"each of {len(rows)} rows must have a source below {len(schema.sources)}, got {list(rows.sources)}"
        )


def write_shard_sources(storage: Storage, record: StoreRecord, shard: int, sources: Sequence[int], tokens: str) -> None:
    """Write the object that holds the number of each row's source; ``tokens`` is the digest of the shard's tokens."""
    numbers = np.full(record.schema.shard_size, SOURCE_FILL, "<u2")
    numbers[: len(sources)] = sources
    label = ObjectLabel(record.store_id, (sources_place(shard),), len(sources), tokens)
    _write_object(storage, sources_key(shard), [record.schema.chain(SHARD_SOURCES).encode(numbers)], 1, label)


def _write_column(
    storage: Storage,
    schema: StoreSchema,
    column: str,
    shard: int,
    rows: Sequence[np.ndarray],
    store_id: str,
    digest: str,
) -> ObjectRecord:
    dtype, fill = TOKEN_VALUES[column]

    def chunks() -> Iterator[EncodedChunk]:
        for row in rows:
            chunk = np.full(schema.seq_length, fill, dtype)
            chunk[: len(row)] = row
            yield schema.chain(column).encode(chunk)

    label = ObjectLabel(store_id, (Place(column, 0, None, shard),), len(rows), digest)
    return _write_object(storage, object_key(column, shard), chunks(), schema.tokens.slots, label)


def _write_object(
    storage: Storage, key: str, chunks: Iterable[EncodedChunk], slots: int, label: ObjectLabel
) -> ObjectRecord:
    writer = ShardWriter(storage.create(key), slots)
    try:
        for slot, chunk in enumerate(chunks):
            writer.append(slot, chunk)
        return writer.finish(label)
    except BaseException:
        writer.abort()
        raise
