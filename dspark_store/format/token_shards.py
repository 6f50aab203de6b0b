"""Token shards: ids and masks of R samples, the digest over them, and reading them back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from dspark_store.format.arrays import DIGEST_BYTES
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.grid import ShardGrid
from dspark_store.format.ledger import token_ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.objects import Expected, open_object
from dspark_store.format.schema import ID_FILL, IDS, MASK, MASK_FILL, SHARD_SOURCES, object_key
from dspark_store.format.shard import ObjectRecord, Place
from dspark_store.format.storage import Storage

TOKEN_VALUES = {IDS: ("<i4", ID_FILL), MASK: ("u1", MASK_FILL)}
"""The dtype of each token column, and what stands past a sample's end."""


def sample_digest(input_ids: np.ndarray, loss_mask: np.ndarray) -> bytes:
    """Return the digest of a sample: blake2b-128 over its ids (little-endian int32), then its mask (uint8)."""
    state = hashlib.blake2b(np.ascontiguousarray(input_ids, "<i4").tobytes(), digest_size=DIGEST_BYTES)
    state.update(np.ascontiguousarray(loss_mask, np.uint8).tobytes())
    return state.digest()


def shard_digest(samples: Iterable[bytes]) -> str:
    """Return the digest of a shard's tokens: blake2b-128 over its samples' digests, in order, in hexadecimal."""
    return hashlib.blake2b(b"".join(samples), digest_size=DIGEST_BYTES).hexdigest()


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


def sources_key(shard: int) -> str:
    """Return the key of the object that holds the sources of a shard's rows."""
    return f"{SHARD_SOURCES}/c.{shard}.0"


def sources_place(shard: int) -> Place:
    """Return the place of that object."""
    return Place(SHARD_SOURCES, 0, None, shard)


def read_shard_sources(storage: Storage, record: StoreRecord, shard: int, rows: TokenRows) -> np.ndarray:
    """Return the number of the source of each row of a committed shard whose tokens are ``rows``, (rows,) uint16.

    DamagedStoreError naming the object when it is missing, or is not what was written with these tokens.
    """
    schema, key = record.schema, sources_key(shard)
    numbers = np.empty(schema.shard_size, "<u2")
    expected = Expected(record.store_id, sources_place(shard), tokens=rows.digest)
    stored = open_object(storage, key, ShardGrid(1, 1, 1, 1), expected)
    with closing(stored.reader):
        stored.decode(0, schema.chain(SHARD_SOURCES), numbers)
    if stored.tail.label.rows != len(rows) or (numbers[: len(rows)] >= len(schema.sources)).any():
        raise DamagedStoreError(f"object {key} of {storage} does not name the sources of {len(rows)} rows")
    return numbers[: len(rows)]


def read_token_shard(storage: Storage, record: StoreRecord, shard: int) -> TokenRows:
    """Read a committed token shard back; DamagedStoreError naming the object when it is not what was written."""
    row = token_ledger(storage).row(shard)
    return read_rows(storage, record, shard, [ObjectRecord(int(nbytes), int(digest)) for nbytes, digest in row])


def read_rows(storage: Storage, record: StoreRecord, shard: int, ledger_row: Sequence[ObjectRecord]) -> TokenRows:
    """Read the token shard that a row of the token ledger describes; see `read_token_shard`."""
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
    stored = open_object(storage, key, schema.tokens, expected)
    dtype, fill = TOKEN_VALUES[column]
    values = []
    with closing(stored.reader):
        out = np.empty(schema.seq_length, dtype)
        for slot in range(rows):
            stored.decode(slot, schema.chain(column), out)
            values.append(out[: int((out != fill).sum())].copy())
    return values
