"""What is wrong with a store: the errors of reading one, and the problems that a check finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dspark_store.format.jsonvalue import JsonValue


class DamagedStoreError(ValueError):
    """A stored object is missing, truncated, altered or not the one that belongs in its place.

    The message names the object's key and, where it is known, the sample that it hits.
    """

    exit_code = 1


class IrregularObjectError(DamagedStoreError, OSError):
    """What stands in an object's place is no regular file, or has more bytes than the object can have.

    Nothing of it was read. Also an OSError: it is met where the file system is asked.
    """


def remedy(store: object) -> str:
    """Return what an error says that a user can do about damage to a store."""
    return f"run dspark-store repair {store}"


class Part(StrEnum):
    """The parts that a store consists of; every object belongs to one."""

    ROOT = "root"
    """The group's ``zarr.json``, with the record of the whole store in its attributes."""
    NODE = "node"
    """A ``zarr.json`` below the root."""
    INDEX = "index"
    """An array below ``index``."""
    WEIGHTS = "weights"
    """A table of the target."""
    TOKENS = "tokens"
    """An object of ``input_ids`` or ``loss_mask``."""
    STATES = "states"
    """An object of a captured layer or of the last hidden states."""
    TOKEN_LEDGER = "token_ledger"
    """A row of ``ledger/tokens``: the commit of a shard's tokens."""
    STATE_LEDGER = "state_ledger"
    """A row of ``ledger/states``: the commit of a shard's states."""
    SHARD_SOURCES = "shard_sources"
    """An object of ``ledger/sources``: which source each row of a shard came from."""
    STRAY = "stray"
    """An object that no part of the store accounts for."""


@dataclass(frozen=True, slots=True)
class Problem:
    """An object of a store that is missing, or is not as it was written.

    Attributes:
        part: which part of the store the object belongs to.
        key: the object's key, relative to the store.
        shard: the object's shard, None where it belongs to none.
        samples: the samples that the damage hits: some of a shard where single chunks are wrong, all of it where the
            object cannot be trusted, none where no sample's values are in doubt.
        message: what is wrong, in one line, without the key.
    """

    part: Part
    key: str
    shard: int | None
    samples: tuple[int, ...]
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"

    @property
    def order(self) -> tuple[int, int, str, tuple[int, ...], str]:
        """What problems are sorted by: the store's own objects, then shard by shard."""
        shard = -1 if self.shard is None else self.shard
        return (shard, list(Part).index(self.part), self.key, self.samples, self.message)

    def to_json(self) -> dict[str, JsonValue]:
        """Return this as a JSON value."""
        return {
            "part": self.part.value,
            "key": self.key,
            "shard": self.shard,
            "samples": list(self.samples),
            "message": self.message,
        }
