"""A store during a repair: what was found, what has been put right, and what is taken back to be made again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

import numpy as np

from dspark_store.format.arrays import DIGEST_BYTES, array_keys, object_limit, pack_array, unpack_array
from dspark_store.format.damage import DamagedStoreError, IrregularObjectError
from dspark_store.format.ledger import state_ledger, token_ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.metadata import ROOT_KEY, node_key, record_nodes
from dspark_store.format.schema import WEIGHTS, ArraySpec, StoreSchema
from dspark_store.inspection.repair.overlay import Overlay
from dspark_store.inspection.repair.roots import BeyondRepairError, SealedRoot, mend_metadata
from dspark_store.inspection.shardwise import Workers
from dspark_store.readers.checks.strays import is_object_name
from dspark_store.writers.recovery import sweep_uncommitted


@dataclass(slots=True)
class RepairState:
    """A store that is mended in an overlay, under the record that it has by now: in the end, the plan of a repair.

    ``restored`` are the keys of objects that the rest of the store has proved, and that are as they were again;
    ``removed`` those of objects that are no part of it, ``left`` those of files that no writer names so, which are left
    alone. ``tokens`` and ``states`` are the shards that must be made again, with the reason, ``weights`` the reason why
    the target's tables must be, or "". ``swept`` objects of what is uncommitted are removed. The next precompute runs
    the target over ``samples`` samples.
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
    swept: int = 0
    samples: int = 0

    @property
    def record(self) -> StoreRecord:
        """The record as it is by now."""
        return self.root.record

    @property
    def schema(self) -> StoreSchema:
        """The shape of the store."""
        return self.record.schema

    @property
    def lost(self) -> bool:
        """Whether something must be made again."""
        return bool(self.tokens or self.states or self.weights)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to repair."""
        return not self.storage.changes

    def samples_of(self, shard: int) -> str:
        """Return the samples of a shard as text."""
        grid = self.schema.tokens
        known = shard < grid.num_shards  # in a store whose tokens are not settled, no shard is
        samples = grid.rows(shard) if known else range(shard * grid.shard_size, (shard + 1) * grid.shard_size)
        return f"{samples.start}-{samples.stop - 1}"

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

    def restore_index(self, values: Mapping[str, np.ndarray]) -> None:
        """Write arrays of the index that are not these, and their checksums into the record, where it has others."""
        specs = self._index_specs()
        checksums: dict[str, str] = {}
        for path, array in values.items():
            (key,) = array_keys(path, specs[path])
            data = pack_array(array.astype(specs[path].data_type, copy=False))
            self.restore(key, data)
            checksums[path] = _digest(data)
        record = self.record.with_checksums(checksums)
        if record != self.record:  # somebody has sealed what he edited
            self.restored += self.write_record(record)

    def read_index(self, path: str) -> tuple[np.ndarray | None, bool]:
        """Return an array of the index, None when it is damaged, and whether it is the one that was sealed."""
        spec = self._index_specs()[path]
        (key,) = array_keys(path, spec)
        try:
            data = self.storage.read(key, object_limit(spec))
            return unpack_array(data, spec.data_type, spec.shape, key), self.is_sealed(path, data)
        except (OSError, DamagedStoreError):
            return None, False

    def is_sealed(self, path: str, data: bytes) -> bool:
        """Tell whether these are the bytes of an array of the index that was sealed."""
        return _digest(data) == self.record.checksums.get(path)

    def _index_specs(self) -> dict[str, ArraySpec]:
        return {**self.schema.token_index(), **self.schema.final_index()}

    def write_record(self, record: StoreRecord) -> list[str]:
        """Go on under another record, and write every ``zarr.json`` that differs under it; return their keys."""
        self.root = self.root.changed(record)
        return mend_metadata(self.storage, self.root)

    def mark_lost(self, shards: dict[int, str], shard: int, why: str) -> None:
        """Note that a shard must be made again; the first reason counts."""
        shards.setdefault(shard, why)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def uncommit(state: RepairState) -> None:
    """Take back the lost shards and tables of a store, and with them the phase that they belong to.

    BeyondRepairError when a column was encoded anew by another tool, as which nothing here could make it again.
    """
    if state.root.foreign:
        name, reason = min(state.root.foreign), _first_reason(state)
        raise BeyondRepairError(
            f"{state.storage} cannot be repaired, since another tool has encoded {name} anew: {reason}; put the "
            "files back from a backup, or precompute into a new --output-dir"
        )
    record = without_weights(state.record) if state.weights else state.record
    if record.phase != "tokens":
        state.write_record(in_phase_states(record))
    elif state.weights:
        state.write_record(record)
    states = state_ledger(state.storage, state.schema)
    for shard in sorted(state.states):
        states.retract(shard)
    if state.tokens:
        # the states' rows are gone before: in the phase of tokens nobody looks into their objects
        state.write_record(in_phase_tokens(state.record))
        for shard in sorted(state.tokens):
            token_ledger(state.storage).retract(shard)


def sweep(state: RepairState) -> int:
    """Remove what the record does not promise: arrays of later phases, objects without a ledger row, temporary files.

    Returns how many objects.
    """
    storage, record = state.storage, state.record
    before = len(storage.changes)
    promised = record_nodes(record)
    arrays = [*record.schema.token_index(), *record.schema.final_index(), *WEIGHTS]
    for path in arrays:
        if path not in promised:
            for name in storage.list(path):
                if name == ROOT_KEY or is_object_name(name):
                    storage.delete(f"{path}/{name}")
    for group in sorted({parent.as_posix() for path in arrays for parent in PurePosixPath(path).parents} - {"."}):
        if group not in promised:
            storage.delete(node_key(group))
    sweep_uncommitted(storage, record)
    return len(storage.changes) - before


def in_phase_states(record: StoreRecord) -> StoreRecord:
    """Return the record of a store of which states, or the tables, are still to be made."""
    return replace(record, phase="states", checksums=_without(record, record.schema.final_index()))


def in_phase_tokens(record: StoreRecord) -> StoreRecord:
    """Return the record of a store of which tokens are still to be made; how many samples it has stays known."""
    index = {**record.schema.final_index(), **record.schema.token_index()}
    return replace(record, phase="tokens", checksums=_without(record, index))


def without_weights(record: StoreRecord) -> StoreRecord:
    """Return the record of a store that the target's tables are still to be written to."""
    return replace(record, weights={}, head={}, checksums=_without(record, record.weights))


def _without(record: StoreRecord, paths: Iterable[str]) -> dict[str, str]:
    gone = set(paths)
    return {path: checksum for path, checksum in record.checksums.items() if path not in gone}


def _first_reason(state: RepairState) -> str:
    for what, shards in (("tokens", state.tokens), ("states", state.states)):
        for shard, why in sorted(shards.items()):
            return f"the {what} of shard {shard} must be made again ({why})"
    return f"the target's tables must be written again ({state.weights})"
