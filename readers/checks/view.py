"""A store opened for being checked: what of it could be read, whether or not the rest can."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import INDEX_DIGEST, INDEX_OBJECTS, TOKEN_OBJECTS, StoreSchema
from dspark_store.format.shard import ObjectRecord
from dspark_store.format.storage import Storage


@dataclass(frozen=True, slots=True, eq=False)
class StoreView:
    """A store under examination.

    ``foreign`` are the columns without trailers. ``index`` holds the arrays of the index by path that could be read,
    ``sealed`` the paths of those that are the ones that the root promises. With ``quick`` no chunk is read.
    """

    storage: Storage
    record: StoreRecord
    foreign: frozenset[str]
    index: Mapping[str, np.ndarray]
    sealed: frozenset[str]
    quick: bool

    @property
    def schema(self) -> StoreSchema:
        """The shape of the store."""
        return self.record.schema

    def rows_of(self, path: str, samples: range) -> np.ndarray | None:
        """Return an index array's entries of some samples; None when the store has none, or it cannot be read."""
        values = self.index.get(path)
        return None if values is None else values[samples.start : samples.stop]

    def digests_of(self, samples: range) -> list[bytes] | None:
        """Return the samples' digests as the index has them."""
        values = self.rows_of(INDEX_DIGEST, samples)
        return None if values is None else [row.tobytes() for row in values]

    def table_rows(self, shard: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return a shard's rows of ``index/objects``, those of the tokens and those of the states, or None twice."""
        table = self.index.get(INDEX_OBJECTS)
        if table is None:
            return None, None
        return table[shard, : len(TOKEN_OBJECTS)], table[shard, len(TOKEN_OBJECTS) :]


def entry(row: np.ndarray | None, position: int) -> ObjectRecord | None:
    """Return one object's entry of a ledger row, None of a row that is not there."""
    return None if row is None else ObjectRecord(int(row[position, 0]), int(row[position, 1]))
