"""Putting the ledgers and `index/objects` right by each other and by the objects."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

import numpy as np

from dspark_store.format.arrays import DIGEST_BYTES, array_keys, object_limit, pack_array, unpack_array
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.ledger import Ledger, state_ledger, token_ledger
from dspark_store.format.schema import INDEX_OBJECTS, INDEX_STATUS, TOKEN_OBJECTS
from dspark_store.inspection.repair.evidence import ShardEvidence, gather, state_row, token_row
from dspark_store.inspection.repair.state import RepairState
from dspark_store.writers.publish import STATUS_GOOD, STATUS_NONFINITE

_UNKNOWN = "the row or the cursor of the shard in {} is damaged, and nothing else tells what it was"
_CURSOR = "a cursor in ledger/tokens is not the one that was sealed, and nothing tells which"


def mend_ledgers(state: RepairState) -> list[ShardEvidence]:
    """Put every ledger row right that the rest of the store proves, and `index/objects` of a complete store.

    Shards whose row cannot be proved are noted as lost. Returns what is known of each shard.
    """
    schema, complete = state.schema, state.record.complete
    shards = range(schema.tokens.num_shards)
    found = state.workers.in_order("ledger", partial(gather, state.storage, state.record), shards)
    table, proved = _table(state) if complete else (None, False)
    tokens, states = token_ledger(state.storage), state_ledger(state.storage, schema)
    rows: list[np.ndarray] = []
    for shard, evidence in enumerate(found):
        entry = None if table is None else table[shard]
        ours = None if entry is None else entry[: len(TOKEN_OBJECTS)]
        row = token_row(evidence.tokens, ours, proved=proved, rows=len(schema.tokens.rows(shard)))
        _settle(state, tokens, shard, row, state.tokens)
        if complete or evidence.states.there:
            ours = None if entry is None else entry[len(TOKEN_OBJECTS) :]
            other = state_row(evidence.states, ours, proved=proved)
            _settle(state, states, shard, other, state.states)
            if row is not None and other is not None:
                rows.append(np.concatenate([row, other]))
    if complete and len(rows) == len(shards):
        _mend_table(state, np.stack(rows), proved=proved)
    return found


def mend_status(state: RepairState, found: Sequence[ShardEvidence]) -> None:
    """Put `index/status` right by the trailers of a complete store of which every object is good."""
    schema = state.schema
    status = np.full(schema.num_samples, STATUS_GOOD, np.uint8)
    for shard, evidence in enumerate(found):
        status[[shard * schema.shard_size + row for row in evidence.nonfinite]] = STATUS_NONFINITE
    restore_index(state, {INDEX_STATUS: status})


def restore_index(state: RepairState, values: dict[str, np.ndarray]) -> None:
    """Write arrays of the index that are not these, and their checksums into the record, where it has others."""
    specs = {**state.schema.token_index(), **state.schema.final_index()}
    checksums: dict[str, str] = {}
    for path, array in values.items():
        (key,) = array_keys(path, specs[path])
        data = pack_array(array.astype(specs[path].data_type, copy=False))
        state.restore(key, data)
        checksums[path] = hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()
    record = state.record.with_checksums(checksums)
    if record != state.record:  # somebody has sealed what he edited
        state.restored += state.write_record(record)


def checksum_holds(state: RepairState, path: str, data: bytes) -> bool:
    """Tell whether these are the bytes of an array of the index that was sealed."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest() == state.record.checksums.get(path)


def _settle(state: RepairState, ledger: Ledger, shard: int, row: np.ndarray | None, lost: dict[int, str]) -> None:
    if row is None:
        state.mark_lost(lost, shard, _UNKNOWN.format(ledger.path))
    else:
        state.restore(ledger.key(shard), pack_array(row))


def _table(state: RepairState) -> tuple[np.ndarray | None, bool]:
    """Return `index/objects`, None when it is damaged, and whether it is the one that was sealed."""
    spec = state.schema.final_index()[INDEX_OBJECTS]
    (key,) = array_keys(INDEX_OBJECTS, spec)
    try:
        data = state.storage.read(key, object_limit(spec))
        return unpack_array(data, spec.data_type, spec.shape, key), checksum_holds(state, INDEX_OBJECTS, data)
    except (FileNotFoundError, DamagedStoreError):
        return None, False


def _mend_table(state: RepairState, table: np.ndarray, *, proved: bool) -> None:
    """Write the table that the rows give.

    If a table was the sealed one and the rows are right without it, it was sealed after somebody had edited it. If
    there was none, the rows must give the one that was sealed: else one of them has a cursor that nothing else tells.
    """
    if not proved and not checksum_holds(state, INDEX_OBJECTS, pack_array(table)):
        for shard in range(len(table)):
            state.mark_lost(state.tokens, shard, _CURSOR)
        return
    restore_index(state, {INDEX_OBJECTS: table})
