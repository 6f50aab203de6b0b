"""Mending a store whose tokens are not settled: it has no index yet, and rows prove themselves by their objects."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from dspark_store.format.ledger import state_ledger, token_ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.storage import Storage
from dspark_store.inspection.repair.evidence import gather
from dspark_store.inspection.repair.mending import Mending
from dspark_store.inspection.repair.tokenindex import read_tokens


def mend_token_phase(mending: Mending) -> None:
    """Note the shards whose tokens are not whole, and the states that do not fit their row or their tokens.

    States are there only when an earlier repair has taken tokens back. Their chunks are not looked at.
    """
    storage, record = mending.storage, mending.record
    shards = token_ledger(storage).committed()
    digests: dict[int, str] = {}
    found = mending.workers.in_order("tokens", partial(read_tokens, storage, record), shards)
    for shard, tokens in zip(shards, found, strict=True):
        if tokens.damaged or tokens.sourceless:
            mending.spoil(mending.tokens, shard, tokens.damaged or "the object with its sources is damaged")
        elif tokens.digest:
            digests[shard] = tokens.digest
    states = state_ledger(storage, mending.schema).committed()
    misfit = partial(_misfit, storage, record, digests)
    for shard, problem in zip(states, mending.workers.in_order("states", misfit, states), strict=True):
        if problem:
            mending.spoil(mending.states, shard, problem)


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
