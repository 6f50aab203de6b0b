"""Token shards: ids and masks of R samples, and the ledger row that commits them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
    TOKEN_LEDGER,
    TOKEN_OBJECTS,
    StoreSchema,
    object_key,
)
from dspark_store.format.shard import ObjectLabel, ObjectRecord, Place, ShardWriter
from dspark_store.format.storage import Storage


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The tokens of one shard: for each row its ids, (length,) int32, and its mask, (length,) uint8."""

    ids: Sequence[np.ndarray]
    masks: Sequence[np.ndarray]

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

    ``cursor`` is where the source goes on after it. FileExistsError when the shard is committed already.
    """
    schema = record.schema
    digest = rows.digest
    records = [
        _write_column(storage, schema, IDS, shard, rows.ids, record.store_id, digest),
        _write_column(storage, schema, MASK, shard, rows.masks, record.store_id, digest),
        ObjectRecord(cursor, len(rows)),
    ]
    token_ledger(storage).publish(shard, records)


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
    chain = schema.chain(column)
    writer = ShardWriter(storage.create(object_key(column, shard)), schema.tokens.slots)
    try:
        for slot, row in enumerate(rows):
            chunk = np.full(schema.seq_length, fill, dtype)
            chunk[: len(row)] = row
            writer.append(slot, chain.encode(chunk))
        return writer.finish(ObjectLabel(store_id, (Place(column, 0, None, shard),), len(rows), digest))
    except BaseException:
        writer.abort()
        raise


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
