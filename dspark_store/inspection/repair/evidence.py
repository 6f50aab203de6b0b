"""What the ledgers, the index and the objects say of a shard, and putting them right by each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from dspark_store.format.arrays import pack_array
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.grid import ShardGrid
from dspark_store.format.ledger import Ledger, state_ledger, token_ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.objects import Expected, open_object
from dspark_store.format.schema import IDS, INDEX_OBJECTS, INDEX_SOURCE, INDEX_STATUS, MASK, TOKEN_OBJECTS, object_key
from dspark_store.format.shard import ObjectTail, Place
from dspark_store.format.storage import Storage
from dspark_store.format.token_shards import read_shard_sources, read_token_shard, sources_key
from dspark_store.inspection.repair.state import RepairState
from dspark_store.writers.publish import (
    STATUS_GOOD,
    STATUS_NONFINITE,
    TokenSummary,
    summarise_tokens,
    token_index_values,
)
from dspark_store.writers.tokens import write_shard_sources

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
        return all(tail in (None, tuple(entry)) for tail, entry in zip(self.tails, row.tolist(), strict=False))

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
    tail = partial(_tail, storage, record)
    tokens = [tail(object_key(place.column, shard), place, schema.tokens) for place in places]
    states = [tail(item.key(shard), item.place(shard), schema.states) for item in schema.state_objects]
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


@dataclass(frozen=True, slots=True)
class ReadTokens:
    """A shard's tokens as they are stored: what the index says of them, None if they are ``damaged``, and why.

    ``digest`` is that of the shard's tokens; ``sourceless`` tells that the object with their sources is damaged.
    """

    summary: TokenSummary | None
    digest: str = ""
    damaged: str = ""
    sourceless: bool = False


def read_tokens(storage: Storage, record: StoreRecord, shard: int) -> ReadTokens:
    """Read and decode a shard's tokens and their sources."""
    try:
        rows = read_token_shard(storage, record, shard)
    except (ValueError, OSError) as error:
        return ReadTokens(None, damaged=str(error))
    sources, sourceless = np.empty(0, np.uint16), False
    if record.schema.sources:
        try:
            sources = read_shard_sources(storage, record, shard, rows)
        except (ValueError, OSError):
            sourceless = True
    return ReadTokens(summarise_tokens(rows, sources), rows.digest, sourceless=sourceless)


def mend_token_index(state: RepairState) -> None:
    """Put the index right where all tokens are whole; note the shards whose tokens are not.

    Tokens that another tool has encoded anew have no ledger and no labels that could prove them, and prove nothing.
    """
    if state.root.foreign & {IDS, MASK}:
        return
    shards = range(state.schema.tokens.num_shards)
    found = state.workers.in_order("tokens", partial(read_tokens, state.storage, state.record), shards)
    for shard, tokens in enumerate(found):
        if tokens.damaged:
            state.mark_lost(state.tokens, shard, tokens.damaged)
    if any(tokens.sourceless for tokens in found):
        found = _mend_sources(state, found)
    summaries = [tokens.summary for tokens in found if tokens.summary is not None]
    if not state.tokens:
        state.restore_index(token_index_values(state.schema, summaries))


def _mend_sources(state: RepairState, found: Sequence[ReadTokens]) -> list[ReadTokens]:
    """Write damaged objects of sources again from `index/source`; without it, the tokens must be made again."""
    numbers, sealed = state.read_index(INDEX_SOURCE)
    if not sealed or numbers is None or (numbers >= len(state.schema.sources)).any():
        numbers = None
    mended = list(found)
    for shard, tokens in enumerate(found):
        if tokens.summary is None or not tokens.sourceless:
            continue
        rows = state.schema.tokens.rows(shard)
        if numbers is None:
            state.mark_lost(state.tokens, shard, f"{sources_key(shard)} and {INDEX_SOURCE} are both damaged")
            continue
        write_shard_sources(state.storage, state.record, shard, numbers[rows].tolist(), tokens.digest)
        state.restored.append(sources_key(shard))
        mended[shard] = read_tokens(state.storage, state.record, shard)
    return mended


def mend_token_phase(state: RepairState) -> None:
    """Note the shards whose tokens are not whole, and the states that do not fit their row or their tokens.

    States are there only when an earlier repair has taken tokens back. Their chunks are not looked at.
    """
    storage, record = state.storage, state.record
    shards = token_ledger(storage).committed()
    digests: dict[int, str] = {}
    found = state.workers.in_order("tokens", partial(read_tokens, storage, record), shards)
    for shard, tokens in zip(shards, found, strict=True):
        if tokens.damaged or tokens.sourceless:
            state.mark_lost(state.tokens, shard, tokens.damaged or "the object with its sources is damaged")
        elif tokens.digest:
            digests[shard] = tokens.digest
    states = state_ledger(storage, state.schema).committed()
    misfit = partial(_misfit, storage, record, digests)
    for shard, problem in zip(states, state.workers.in_order("states", misfit, states), strict=True):
        if problem:
            state.mark_lost(state.states, shard, problem)


def _misfit(storage: Storage, record: StoreRecord, digests: Mapping[int, str], shard: int) -> str:
    """Return what is wrong with a shard's states by their row and their tails, "" when nothing is."""
    evidence = gather(storage, record, shard)
    key = state_ledger(storage, record.schema).key(shard)
    if evidence.states.row is None:
        return f"{key} is damaged"
    if evidence.states.by_tails is None or not evidence.states.agrees(evidence.states.row):
        return f"the objects are not those that {key} names"
    known = digests.get(shard)
    return "they were captured from other tokens" if known and {known} != evidence.digests else ""
