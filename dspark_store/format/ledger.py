"""The ledger: one small object a shard, whose presence is the shard's commit.

A row holds (bytes, digest) of every object of the shard, and is published with a link that refuses to replace, so of
two committers one loses. The row of the token ledger ends with the cursor into the source.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from dspark_store.format.arrays import pack_array, unpack_array
from dspark_store.format.codecs import CRC_BYTES
from dspark_store.format.schema import IDS, MASK, STATE_LEDGER, TOKEN_LEDGER, TOKEN_OBJECTS, StoreSchema
from dspark_store.format.shard import ObjectRecord
from dspark_store.format.storage import Storage

_ROW_NAME = re.compile(r"c\.(0|[1-9][0-9]{0,17})\.0\.0")


def counted_objects(states: np.ndarray) -> np.ndarray:
    """Tell which state objects are not that of the last hidden states over again: (shards, K+1) bool.

    ``states`` are rows of the state ledger, (shards, K+1, 2) uint64. A captured last layer has one object with the last
    hidden states, at two places with the same size and digest: it counts once, as that of the last hidden states.
    """
    counted: np.ndarray = (states != states[:, -1:]).any(axis=2)
    counted[:, -1] = True
    return counted


def distinct_bytes(rows: np.ndarray) -> np.ndarray:
    """Return the stored bytes of each object of the joined rows (shards, 3+K+1, 2): the same shape without fields.

    An object with two places counts once, see `counted_objects`; the entry that is no object counts nothing.
    """
    sizes: np.ndarray = rows[:, :, 0].copy()
    tokens = len(TOKEN_OBJECTS)
    sizes[:, [position for position, name in enumerate(TOKEN_OBJECTS) if name not in (IDS, MASK)]] = 0
    sizes[:, tokens:][~counted_objects(rows[:, tokens:])] = 0
    return sizes


class Ledger:
    """The ledger of one phase, kept in the array at ``path`` with ``objects`` entries a row."""

    def __init__(self, storage: Storage, path: str, objects: int) -> None:
        self._storage = storage
        self.path = path
        self._objects = objects

    def key(self, shard: int) -> str:
        """Return the key of a shard's row."""
        return f"{self.path}/c.{shard}.0.0"

    def committed(self) -> list[int]:
        """Return the committed shards, ascending; one listing."""
        matches = (_ROW_NAME.fullmatch(name) for name in self._storage.list(self.path))
        return sorted(int(match.group(1)) for match in matches if match)

    def row(self, shard: int) -> np.ndarray:
        """Return a shard's row, (objects, 2) uint64; FileNotFoundError when it is not committed."""
        key = self.key(shard)
        return unpack_array(self._storage.read(key, 16 * self._objects + CRC_BYTES), "uint64", (self._objects, 2), key)

    def publish(self, shard: int, records: Sequence[ObjectRecord]) -> None:
        """Commit a shard; FileExistsError when it is committed already."""
        row = np.array([(record.nbytes, record.digest) for record in records], np.uint64)
        if row.shape != (self._objects, 2):
            raise ValueError(f"a row of {self.path} has {self._objects} objects, got {len(records)}")
        self._storage.put_new(self.key(shard), pack_array(row))

    def retract(self, shard: int) -> None:
        """Take a shard's commit back, before its objects are touched."""
        self._storage.delete(self.key(shard))


def token_ledger(storage: Storage) -> Ledger:
    """Return the ledger of the token phase."""
    return Ledger(storage, TOKEN_LEDGER, len(TOKEN_OBJECTS))


def state_ledger(storage: Storage, schema: StoreSchema) -> Ledger:
    """Return the ledger of the states phase."""
    return Ledger(storage, STATE_LEDGER, len(schema.state_objects))
