"""Putting tokens right: the index by the tokens, the shards' sources by the index, and a store in its token phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from dspark_store.format.ledger import state_ledger, token_ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import IDS, INDEX_SOURCE, MASK
from dspark_store.format.storage import Storage
from dspark_store.format.token_shards import TokenRows, read_shard_sources, read_token_shard, sources_key
from dspark_store.inspection.repair.evidence import gather
from dspark_store.inspection.repair.state import RepairState
from dspark_store.writers.publish import TokenSummary, summarise_tokens, token_index_values
from dspark_store.writers.tokens import write_shard_sources


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
    sources = _read_sources(storage, record, shard, rows)
    summary = summarise_tokens(rows, np.empty(0, np.uint16) if sources is None else sources)
    return ReadTokens(summary, rows.digest, sourceless=sources is None)


def _read_sources(storage: Storage, record: StoreRecord, shard: int, rows: TokenRows) -> np.ndarray | None:
    if not record.schema.sources:
        return np.empty(0, np.uint16)
    try:
        return read_shard_sources(storage, record, shard, rows)
    except (ValueError, OSError):
        return None


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
