"""A store while it is mended: what was found, and what has been put right so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from dspark_store.format.damage import IrregularObjectError
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import StoreSchema
from dspark_store.inspection.repair.overlay import Overlay
from dspark_store.inspection.repair.roots import SealedRoot, mend_metadata
from dspark_store.inspection.shardwise import Workers


@dataclass(slots=True)
class Mending:
    """A store that is mended in an overlay, under the record that it has by now.

    ``restored`` are the keys of objects that the rest of the store has proved, and that are as they were again;
    ``removed`` those of objects that are no part of it, ``left`` those of files that no writer names so, which are left
    alone. ``tokens`` and ``states`` are the shards that must be made
    again, with the reason, ``weights`` the reason why the target's tables must be, or "".
    """

    storage: Overlay
    root: SealedRoot
    workers: Workers
    restored: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    tokens: dict[int, str] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)
    weights: str = ""

    @property
    def record(self) -> StoreRecord:
        """The record as it is by now."""
        return self.root.record

    @property
    def schema(self) -> StoreSchema:
        """The shape of the store."""
        return self.record.schema

    @property
    def spoiled(self) -> bool:
        """Whether something must be made again."""
        return bool(self.tokens or self.states or self.weights)

    def restore(self, key: str, data: bytes) -> None:
        """Put an object right, unless it is."""
        try:
            right = self.storage.read(key, len(data)) == data
        except (FileNotFoundError, IrregularObjectError):
            right = False
        if not right:
            self.storage.put(key, data)
            self.restored.append(key)

    def remove(self, key: str) -> None:
        """Remove an object that is no part of the store."""
        if self.storage.exists(key):
            self.storage.delete(key)
            self.removed.append(key)

    def write_record(self, record: StoreRecord) -> list[str]:
        """Go on under another record, and write every ``zarr.json`` that differs under it; return their keys."""
        self.root = self.root.changed(record)
        return mend_metadata(self.storage, self.root)

    def spoil(self, shards: dict[int, str], shard: int, why: str) -> None:
        """Note that a shard must be made again; the first reason counts."""
        shards.setdefault(shard, why)
