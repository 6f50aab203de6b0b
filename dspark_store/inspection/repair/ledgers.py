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
from dspark_store.inspection.repair.state import Mending
from dspark_store.writers.publish import STATUS_GOOD, STATUS_NONFINITE

_UNKNOWN = "the row or the cursor of the shard in {} is damaged, and nothing else tells what it was"
_CURSOR = "a cursor in ledger/tokens is not the one that was sealed, and nothing tells which"


def mend_ledgers(mending: Mending) -> list[ShardEvidence]:
    """Put every ledger row right that the rest of the store proves, and `index/objects` of a complete store.

    Shards whose row cannot be proved are noted as spoiled. Returns what is known of each shard.
    """
    schema, complete = mending.schema, mending.record.complete
    shards = range(schema.tokens.num_shards)
    found = mending.workers.in_order("ledger", partial(gather, mending.storage, mending.record), shards)
    table, proved = _table(mending) if complete else (None, False)
    tokens, states = token_ledger(mending.storage), state_ledger(mending.storage, schema)
    rows: list[np.ndarray] = []
    for shard, evidence in enumerate(found):
        entry = None if table is None else table[shard]
        ours = None if entry is None else entry[: len(TOKEN_OBJECTS)]
        row = token_row(evidence.tokens, ours, proved=proved, rows=len(schema.tokens.rows(shard)))
        _settle(mending, tokens, shard, row, mending.tokens)
        if complete or evidence.states.there:
            ours = None if entry is None else entry[len(TOKEN_OBJECTS) :]
            other = state_row(evidence.states, ours, proved=proved)
            _settle(mending, states, shard, other, mending.states)
            if row is not None and other is not None:
                rows.append(np.concatenate([row, other]))
    if complete and len(rows) == len(shards):
        _mend_table(mending, np.stack(rows), proved=proved)
    return found


def mend_status(mending: Mending, found: Sequence[ShardEvidence]) -> None:
    """Put `index/status` right by the trailers of a complete store of which every object is good."""
    schema = mending.schema
    status = np.full(schema.num_samples, STATUS_GOOD, np.uint8)
    for shard, evidence in enumerate(found):
        status[[shard * schema.shard_size + row for row in evidence.nonfinite]] = STATUS_NONFINITE
    restore_index(mending, {INDEX_STATUS: status})


def restore_index(mending: Mending, values: dict[str, np.ndarray]) -> None:
    """Write arrays of the index that are not these, and their checksums into the record, where it has others."""
    specs = {**mending.schema.token_index(), **mending.schema.final_index()}
    checksums: dict[str, str] = {}
    for path, array in values.items():
        (key,) = array_keys(path, specs[path])
        data = pack_array(array.astype(specs[path].data_type, copy=False))
        mending.restore(key, data)
        checksums[path] = hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()
    record = mending.record.with_checksums(checksums)
    if record != mending.record:  # somebody has sealed what he edited
        mending.restored += mending.write_record(record)


def checksum_holds(mending: Mending, path: str, data: bytes) -> bool:
    """Tell whether these are the bytes of an array of the index that was sealed."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest() == mending.record.checksums.get(path)


def _settle(mending: Mending, ledger: Ledger, shard: int, row: np.ndarray | None, spoiled: dict[int, str]) -> None:
    if row is None:
        mending.spoil(spoiled, shard, _UNKNOWN.format(ledger.path))
    else:
        mending.restore(ledger.key(shard), pack_array(row))


def _table(mending: Mending) -> tuple[np.ndarray | None, bool]:
    """Return `index/objects`, None when it is damaged, and whether it is the one that was sealed."""
    spec = mending.schema.final_index()[INDEX_OBJECTS]
    (key,) = array_keys(INDEX_OBJECTS, spec)
    try:
        data = mending.storage.read(key, object_limit(spec))
        return unpack_array(data, spec.data_type, spec.shape, key), checksum_holds(mending, INDEX_OBJECTS, data)
    except (FileNotFoundError, DamagedStoreError):
        return None, False


def _mend_table(mending: Mending, table: np.ndarray, *, proved: bool) -> None:
    """Write the table that the rows give.

    If a table was the sealed one and the rows are right without it, it was sealed after somebody had edited it. If
    there was none, the rows must give the one that was sealed: else one of them has a cursor that nothing else tells.
    """
    if not proved and not checksum_holds(mending, INDEX_OBJECTS, pack_array(table)):
        for shard in range(len(table)):
            mending.spoil(mending.tokens, shard, _CURSOR)
        return
    restore_index(mending, {INDEX_OBJECTS: table})
