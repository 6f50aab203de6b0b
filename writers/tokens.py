"""Token shards: ids and masks of R samples, and the ledger row that commits them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dspark_store.format.codecs import EncodedChunk
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.digests import sample_digest, shard_digest
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.objects import Expected, open_object
from dspark_store.format.schema import (
    ID_FILL,
    IDS,
    MASK,
    MASK_FILL,
    SHARD_SOURCES,
    SOURCE_FILL,
    StoreSchema,
    object_key,
)
from dspark_store.format.shard import ObjectLabel, ObjectRecord, Place, ShardWriter
from dspark_store.format.storage import Storage
from dspark_store.writers.ledgers import token_ledger


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The tokens of one shard: for each row its ids, (length,) int32, and its mask, (length,) uint8.

    ``sources`` holds the number of each row's source, in a store of several.
    """

    ids: Sequence[np.ndarray]
    masks: Sequence[np.ndarray]
    sources: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def digests(self) -> list[bytes]:
        """Return every sample's digest."""
        return [sample_digest(ids, mask) for ids, mask in zip(self.ids, self.masks, strict=True)]

    @property
    def digest(self) -> str:
        """The digest that the trailers of the shard's objects carry."""
        return shard_digest(self.digests())

    @property
    def lengths(self) -> list[int]:
        """Tokens in each row."""
        return [len(ids) for ids in self.ids]


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
    found = _read_rows(storage, record, shard, records)
    sources = read_shard_sources(storage, record, shard, rows) if record.schema.sources else rows.sources
    if found.digests() != rows.digests() or list(sources) != list(rows.sources):
        raise DamagedStoreError(f"tokens of shard {shard} of {storage} read back other than they were written")


def sources_key(shard: int) -> str:
    """Return the key of the object that holds the sources of a shard's rows."""
    return f"{SHARD_SOURCES}/c.{shard}.0"


def _sources_place(shard: int) -> Place:
    return Place(SHARD_SOURCES, 0, None, shard)


def _check_sources(schema: StoreSchema, rows: TokenRows) -> None:
    if len(rows.sources) != len(rows) or not all(0 <= source < len(schema.sources) for source in rows.sources):
        raise ValueError(
            f"each of {len(rows)} rows must have a source below {len(schema.sources)}, got {list(rows.sources)}"
        )


def write_shard_sources(storage: Storage, record: StoreRecord, shard: int, sources: Sequence[int], tokens: str) -> None:
    """Write the object that holds the number of each row's source; ``tokens`` is the digest of the shard's tokens."""
    numbers = np.full(record.schema.shard_size, SOURCE_FILL, "<u2")
    numbers[: len(sources)] = sources
    label = ObjectLabel(record.store_id, (_sources_place(shard),), len(sources), tokens)
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
    dtype, fill = ("<i4", ID_FILL) if column == IDS else ("u1", MASK_FILL)

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


def read_shard_sources(storage: Storage, record: StoreRecord, shard: int, rows: TokenRows) -> np.ndarray:
    """Return the number of the source of each row of a committed shard whose tokens are ``rows``, (rows,) uint16.

    DamagedStoreError naming the object when it is missing, or is not what was written with these tokens.
    """
    schema, key = record.schema, sources_key(shard)
    numbers = np.empty(schema.shard_size, "<u2")
    stored = open_object(storage, key, 1, Expected(record.store_id, _sources_place(shard), tokens=rows.digest))
    try:
        stored.decode(0, schema.chain(SHARD_SOURCES), numbers)
    finally:
        stored.reader.close()
    if stored.tail.label.rows != len(rows) or (numbers[: len(rows)] >= len(schema.sources)).any():
        raise DamagedStoreError(f"object {key} of {storage} does not name the sources of {len(rows)} rows")
    return numbers[: len(rows)]


def read_token_shard(storage: Storage, record: StoreRecord, shard: int) -> TokenRows:
    """Read a committed token shard back; DamagedStoreError naming the object when it is not what was written."""
    row = token_ledger(storage).row(shard)
    return _read_rows(storage, record, shard, [ObjectRecord(int(nbytes), int(digest)) for nbytes, digest in row])


def _read_rows(storage: Storage, record: StoreRecord, shard: int, ledger_row: Sequence[ObjectRecord]) -> TokenRows:
    ids_record, mask_record, cursor = ledger_row
    if cursor.digest > record.schema.shard_size:
        raise DamagedStoreError(
            f"row of shard {shard} in the token ledger of {storage} names {cursor.digest:,} samples, a shard has "
            f"{record.schema.shard_size:,} at most"
        )
    ids = _read_column(storage, record, IDS, shard, cursor.digest, ids_record)
    masks = _read_column(storage, record, MASK, shard, cursor.digest, mask_record)
    if any(len(values) != len(mask) for values, mask in zip(ids, masks, strict=True)):
        raise DamagedStoreError(f"ids and masks of shard {shard} differ in length")
    return TokenRows(ids, masks)


def _read_column(
    storage: Storage, record: StoreRecord, column: str, shard: int, rows: int, ledger_row: ObjectRecord
) -> list[np.ndarray]:
    """Return the values of each row, without what fills it up."""
    schema = record.schema
    key = object_key(column, shard)
    expected = Expected(record.store_id, Place(column, 0, None, shard), ledger_row)
    stored = open_object(storage, key, schema.tokens.slots, expected)
    dtype, fill = ("<i4", ID_FILL) if column == IDS else ("u1", MASK_FILL)
    try:
        out = np.empty(schema.seq_length, dtype)
        values = []
        for slot in range(rows):
            stored.decode(slot, schema.chain(column), out)
            values.append(out[: int((out != fill).sum())].copy())
    finally:
        stored.reader.close()
    return values
