"""What the ledgers, `index/objects` and the objects say of a shard, and putting them right by each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from dspark_store.format.arrays import pack_array
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.grid import ShardGrid
from dspark_store.format.ledger import Ledger, state_ledger, token_ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.objects import Expected, open_object
from dspark_store.format.schema import IDS, INDEX_OBJECTS, INDEX_STATUS, MASK, TOKEN_OBJECTS, object_key
from dspark_store.format.shard import ObjectTail, Place
from dspark_store.format.storage import Storage
from dspark_store.inspection.repair.state import RepairState
from dspark_store.writers.publish import STATUS_GOOD, STATUS_NONFINITE

CURSOR = len(TOKEN_OBJECTS) - 1
_UNKNOWN = "the row or the cursor of the shard in {} is damaged, and nothing else tells what it was"
_CURSOR = "a cursor in ledger/tokens is not the one that was sealed, and nothing tells which"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one of a shard's ledger rows beside `index/objects`.

    ``row`` is the row itself, (objects, 2) uint64, None when it is missing or unreadable, which ``there`` tells apart.
    ``tails`` has, for each object, its size and digest by its own tail, None where that is damaged or another's.
    """

    row: np.ndarray | None
    there: bool
    tails: tuple[tuple[int, int] | None, ...]

    def agrees(self, row: np.ndarray) -> bool:
        """Whether a row says nothing else than those tails that are whole."""
        return all(tail is None or tail == _fields(row, place) for place, tail in enumerate(self.tails))

    @property
    def by_tails(self) -> np.ndarray | None:
        """The row that the objects give, without what is not of an object; None unless all of them are whole."""
        known = [tail for tail in self.tails if tail is not None]
        return np.array(known, np.uint64) if len(known) == len(self.tails) else None


@dataclass(frozen=True, slots=True)
class ShardEvidence:
    """What is known of a shard. ``nonfinite`` are the rows that any tail marks, ``digests`` the tokens they name."""

    tokens: Evidence
    states: Evidence
    nonfinite: frozenset[int]
    digests: frozenset[str]


def gather(storage: Storage, record: StoreRecord, shard: int) -> ShardEvidence:
    """Read both ledger rows of a shard and the tail of every object that it has."""
    schema = record.schema
    places = [Place(column, 0, None, shard) for column in (IDS, MASK)]
    tokens = [_tail(storage, record, object_key(place.column, shard), place, schema.tokens) for place in places]
    states = [
        _tail(storage, record, item.key(shard), item.place(shard), schema.states) for item in schema.state_objects
    ]
    whole = [tail for tail in (*tokens, *states) if tail is not None]
    return ShardEvidence(
        _evidence(token_ledger(storage), shard, tokens),
        _evidence(state_ledger(storage, schema), shard, states),
        frozenset(row for tail in whole for row in tail.label.nonfinite),
        frozenset(tail.label.tokens for tail in whole),
    )


def token_row(evidence: Evidence, entry: np.ndarray | None, *, proved: bool, rows: int) -> np.ndarray | None:
    """Return the right ledger row of a shard's tokens, (3, 2); None when it is not known.

    ``entry`` is what `index/objects` has for it, ``proved`` whether by its checksum that is what was sealed, ``rows``
    the samples of the shard. The cursor stands nowhere else: where the two differ in it alone, neither is right.
    """
    fits = [row for row in (evidence.row, entry if proved else None) if row is not None and int(row[CURSOR, 1]) == rows]
    fits = [row for row in fits if evidence.agrees(row)]
    if len(fits) == 2 and not np.array_equal(fits[0], fits[1]):
        return None
    return fits[0] if fits else None


def state_row(evidence: Evidence, entry: np.ndarray | None, *, proved: bool) -> np.ndarray | None:
    """Return the right ledger row of a shard's states, (objects, 2); None when it is not known."""
    by_tails = evidence.by_tails if evidence.row is None else None
    choices = (evidence.row, entry if proved else None, by_tails)
    fits = [row for row in choices if row is not None and evidence.agrees(row)]
    if proved and len(fits) > 1:
        return fits[1]  # if the two differ, an object is damaged: it will be found
    return fits[0] if fits else None


def _fields(row: np.ndarray, place: int) -> tuple[int, int]:
    return int(row[place, 0]), int(row[place, 1])


def _evidence(ledger: Ledger, shard: int, tails: Sequence[ObjectTail | None]) -> Evidence:
    known = tuple(None if tail is None else (tail.record.nbytes, tail.record.digest) for tail in tails)
    try:
        return Evidence(ledger.row(shard), True, known)
    except FileNotFoundError:
        return Evidence(None, False, known)
    except (DamagedStoreError, OSError):
        return Evidence(None, True, known)


def _tail(storage: Storage, record: StoreRecord, key: str, place: Place, grid: ShardGrid) -> ObjectTail | None:
    try:
        stored = open_object(storage, key, grid, Expected(record.store_id, place))
    except (DamagedStoreError, OSError):
        return None
    stored.reader.close()
    return stored.tail


def mend_ledgers(state: RepairState) -> list[ShardEvidence]:
    """Put every ledger row right that the rest of the store proves, and `index/objects` of a complete store.

    Shards whose row cannot be proved are noted as lost. Returns what is known of each shard.
    """
    schema, complete = state.schema, state.record.complete
    shards = range(schema.tokens.num_shards)
    found = state.workers.in_order("ledger", partial(gather, state.storage, state.record), shards)
    table, proved = state.read_index(INDEX_OBJECTS) if complete else (None, False)
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
    state.restore_index({INDEX_STATUS: status})


def _settle(state: RepairState, ledger: Ledger, shard: int, row: np.ndarray | None, lost: dict[int, str]) -> None:
    if row is None:
        state.mark_lost(lost, shard, _UNKNOWN.format(ledger.path))
    else:
        state.restore(ledger.key(shard), pack_array(row))


def _mend_table(state: RepairState, table: np.ndarray, *, proved: bool) -> None:
    """Write the table that the rows give.

    If a table was the sealed one and the rows are right without it, it was sealed after somebody had edited it. If
    there was none, the rows must give the one that was sealed: else one of them has a cursor that nothing else tells.
    """
    if not proved and not state.is_sealed(INDEX_OBJECTS, pack_array(table)):
        for shard in range(len(table)):
            state.mark_lost(state.tokens, shard, _CURSOR)
        return
    state.restore_index({INDEX_OBJECTS: table})
