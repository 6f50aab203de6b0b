"""Token shards: ids and masks of R samples, and the ledger row that commits them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dspark_store.format.codecs import EncodedChunk
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.digests import sample_digest, shard_digest
from dspark_store.format.ledger import Ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.objects import Expected, open_object
from dspark_store.format.schema import (
    ID_FILL,
    IDS,
    MASK,
    MASK_FILL,
    SHARD_SOURCES,
    SOURCE_FILL,
    TOKEN_LEDGER,
    TOKEN_OBJECTS,
    StoreSchema,
    object_key,
)
from dspark_store.format.shard import ObjectLabel, ObjectRecord, Place, ShardWriter
from dspark_store.format.storage import Storage


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


def token_ledger(storage: Storage) -> Ledger:
    """Return the ledger of the token phase."""
    return Ledger(storage, TOKEN_LEDGER, len(TOKEN_OBJECTS))


def write_token_shard(storage: Storage, record: StoreRecord, shard: int, rows: TokenRows, cursor: int) -> None:
    """Write and commit one shard of tokens.

    ``cursor`` is where the source goes on after it. FileExistsError when the shard is committed already, ValueError
    when the rows' sources are not those of a store with several.
    """
    schema = record.schema
    sources = _source_numbers(schema, rows) if schema.sources else None
    digest = rows.digest
    records = [
        _write_column(storage, schema, IDS, shard, rows.ids, record.store_id, digest),
        _write_column(storage, schema, MASK, shard, rows.masks, record.store_id, digest),
        ObjectRecord(cursor, len(rows)),
    ]
    if sources is not None:
        label = ObjectLabel(record.store_id, (_sources_place(shard),), len(rows), digest)
        _write_object(storage, sources_key(shard), [schema.chain(SHARD_SOURCES).encode(sources)], 1, label)
    token_ledger(storage).publish(shard, records)


def sources_key(shard: int) -> str:
    """Return the key of the object that holds the sources of a shard's rows."""
    return f"{SHARD_SOURCES}/c.{shard}.0"


def _sources_place(shard: int) -> Place:
    return Place(SHARD_SOURCES, 0, None, shard)


def _source_numbers(schema: StoreSchema, rows: TokenRows) -> np.ndarray:
    if len(rows.sources) != len(rows) or not all(0 <= source < len(schema.sources) for source in rows.sources):
        raise ValueError(
            f"each of {len(rows)} rows must have a source below {len(schema.sources)}, got {list(rows.sources)}"
        )
    numbers = np.full(schema.shard_size, SOURCE_FILL, "<u2")
    numbers[: len(rows)] = rows.sources
    return numbers


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
    count = int(row[2, 1])
    ids = _read_column(storage, record, IDS, shard, count, ObjectRecord(int(row[0, 0]), int(row[0, 1])))
    masks = _read_column(storage, record, MASK, shard, count, ObjectRecord(int(row[1, 0]), int(row[1, 1])))
    lengths = [int((values != ID_FILL).sum()) for values in ids]
    if any(length != int((mask != MASK_FILL).sum()) for length, mask in zip(lengths, masks, strict=True)):
        raise DamagedStoreError(f"ids and masks of shard {shard} differ in length")
    return TokenRows(
        [values[:length] for values, length in zip(ids, lengths, strict=True)],
        [values[:length] for values, length in zip(masks, lengths, strict=True)],
    )


def _read_column(
    storage: Storage, record: StoreRecord, column: str, shard: int, rows: int, ledger_row: ObjectRecord
) -> list[np.ndarray]:
    schema = record.schema
    key = object_key(column, shard)
    expected = Expected(record.store_id, Place(column, 0, None, shard), ledger_row)
    stored = open_object(storage, key, schema.tokens.slots, expected)
    dtype = "<i4" if column == IDS else "u1"
    try:
        values = [np.empty(schema.seq_length, dtype) for _ in range(rows)]
        for slot, out in enumerate(values):
            stored.decode(slot, schema.chain(column), out)
    finally:
        stored.reader.close()
    return values
