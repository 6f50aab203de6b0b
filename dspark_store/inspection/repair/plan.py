"""Planning and doing a repair: what the rest of the store proves is restored, what is lost is uncommitted."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

from dspark_store.format.arrays import DIGEST_BYTES, array_keys, object_limit
from dspark_store.format.damage import Part, Problem
from dspark_store.format.ledger import state_ledger
from dspark_store.format.metadata import COPY_KEY, ROOT_KEY, no_store, node_key
from dspark_store.format.schema import COLUMNS, EMBED, HEAD, HEAD_BIAS
from dspark_store.format.storage import LocalStorage, Storage
from dspark_store.inspection.repair.evidence import mend_ledgers, mend_status, mend_token_index, mend_token_phase
from dspark_store.inspection.repair.overlay import Overlay
from dspark_store.inspection.repair.roots import BeyondRepairError, find_root, mend_metadata
from dspark_store.inspection.repair.state import RepairState, sweep, uncommit
from dspark_store.inspection.shardwise import Workers
from dspark_store.readers.checks.findings import StoreView
from dspark_store.readers.checks.store_check import check_weights
from dspark_store.readers.checks.strays import check_strays, is_object_name
from dspark_store.readers.verify import ShardCheck, open_view
from dspark_store.writers.lock import STALE_SECONDS, LostLockError, StoreLock, check_lock, read_holder

_WAIT = "wait for it, or end it"


def _refuse_no_store(storage: LocalStorage) -> None:
    if not any(storage.exists(key) for key in (ROOT_KEY, COPY_KEY, *(node_key(column) for column in COLUMNS))):
        raise FileNotFoundError(f"{no_store(storage)}: there is neither {ROOT_KEY} nor an array of one")


def repair(root: str, workers: Workers, *, dry_run: bool = False, watch_seconds: float = STALE_SECONDS) -> RepairState:
    """Repair the store at ``root``, under its lock, or only say what would be done; return the plan that was made.

    The lock of a job that is gone is taken over; ``watch_seconds`` is what `StoreLock` says.

    BlockingIOError when a job is writing to the store, and what `plan_repair` raises.
    """
    storage = LocalStorage(root)
    _refuse_no_store(storage)
    if dry_run:
        writer = read_holder(storage, watch_seconds=watch_seconds)
        if writer is not None and not writer.stale:
            raise BlockingIOError(f"{root} is being written by process {writer.pid} on {writer.host}; {_WAIT}")
        return plan_repair(root, workers)
    try:
        with StoreLock(storage, remedy=_WAIT, watch_seconds=watch_seconds) as lock:
            plan = plan_repair(root, workers)
            plan.storage.apply(storage, partial(check_lock, storage, lock.holder))
    except LostLockError as error:
        raise BlockingIOError(str(error)) from error
    return plan


def plan_repair(root: str, workers: Workers) -> RepairState:
    """Look at everything in the store at ``root``, and decide what is to be done about what is not as it was.

    FileNotFoundError when there is no store, BeyondRepairError when what is damaged can neither be proved nor made
    again. Nothing is written.
    """
    storage = Overlay(root)
    _refuse_no_store(storage)
    found = find_root(storage)
    state = RepairState(storage, found, workers)
    state.restored += mend_metadata(storage, found)
    if state.record.phase == "tokens":
        mend_token_phase(state)
        mend_weights(state)
    else:
        _mend_settled(state)
    if state.lost:
        uncommit(state)
    _remove_strays(state)
    state.swept = sweep(state)
    grid = state.schema.tokens
    committed = state_ledger(storage, state.schema).committed()
    state.samples = grid.num_samples - sum(len(grid.rows(shard)) for shard in committed if shard < grid.num_shards)
    return state


def _mend_settled(state: RepairState) -> None:
    """Mend a store whose tokens are all there: ledgers first, then the index by the tokens, then object by object."""
    evidence = mend_ledgers(state)
    mend_token_index(state)
    _mend_shards(state)
    mend_weights(state)
    if state.record.complete and not state.lost and not state.root.foreign:
        mend_status(state, evidence)


def _mend_shards(state: RepairState) -> None:
    """Check every object of every shard; link what is good at its other place, note the shards of all else."""
    view = _view(state, quick=False)
    shards = range(state.schema.tokens.num_shards)
    for shard, verdict in enumerate(state.workers.in_order("verify", ShardCheck(view), shards)):
        for problem in verdict.problems:
            if problem.part in (Part.TOKENS, Part.TOKEN_LEDGER, Part.SHARD_SOURCES):
                state.mark_lost(state.tokens, shard, str(problem))
            elif problem.part is Part.STATE_LEDGER:
                state.mark_lost(state.states, shard, str(problem))
        _mend_states(state, shard, [problem for problem in verdict.problems if problem.part is Part.STATES])


def _mend_states(state: RepairState, shard: int, problems: Sequence[Problem]) -> None:
    bad = {problem.key: problem for problem in problems}
    if not bad or shard in state.states:
        return
    items = state.schema.state_objects
    row = state_ledger(state.storage, state.schema).row(shard)
    entries = dict(zip((item.key(shard) for item in items), row.tolist(), strict=True))
    foreign = {item.key(shard) for item in items if item.column in state.root.foreign}
    good = {key: entry for key, entry in entries.items() if key not in bad and key not in foreign}
    links: dict[str, str] = {}
    for key, problem in bad.items():  # a column that was encoded anew is named as a whole, and has no entry
        twins = [twin for twin in good if good[twin] == entries.get(key)]
        if twins:
            links[key] = twins[0]
        else:
            state.mark_lost(state.states, shard, str(problem))
    if shard not in state.states:
        for key, twin in links.items():
            state.storage.link(twin, key)
            state.restored.append(key)


def _remove_strays(state: RepairState) -> None:
    view = _view(state, quick=True)
    for problem in check_strays(view):
        if is_object_name(problem.key.rpartition("/")[2]):
            state.remove(problem.key)
        else:
            state.left.append(problem.key)


def _view(state: RepairState, *, quick: bool) -> StoreView:
    """Open the store as it is mended so far; BeyondRepairError when its metadata or index is still not right."""
    view, problems = open_view(state.storage, quick=quick)
    if view is None or (problems and quick):
        raise BeyondRepairError(
            f"{state.storage} cannot be repaired: {problems[0]}; put the file back from a backup, or precompute into "
            "a new --output-dir"
        )
    return view


def mend_weights(state: RepairState) -> None:
    """Link the objects of a tied head and its embedding to the good ones of both; note other damage."""
    problems = check_weights(state.storage, state.record)
    if not problems:
        return
    bad = {problem.key for problem in problems}
    if any(key.startswith(f"{HEAD_BIAS}/") for key in bad) or not _mend_tied(state, bad):
        state.weights = str(problems[0])


def _mend_tied(state: RepairState, bad: set[str]) -> bool:
    """Choose for each object the place where it is whole, so that together they have the checksum of the tables."""
    record = state.record
    checksum = record.checksums.get(EMBED)
    if checksum is None or checksum != record.checksums.get(HEAD):
        return False
    spec = record.schema.weights(record.weights[EMBED])
    digest = partial(_digest, state.storage, object_limit(spec))
    embedding, head = array_keys(EMBED, spec), array_keys(HEAD, spec)
    for first, second in ((embedding, head), (head, embedding)):
        chosen = [twin if key in bad else key for key, twin in zip(first, second, strict=True)]
        if digest(*chosen) == checksum:
            for key, twin, good in zip(first, second, chosen, strict=True):
                other = twin if good == key else key
                if digest(other) != digest(good):
                    state.storage.link(good, other)
                    state.restored.append(other)
            return True
    return False


def _digest(storage: Storage, limit: int, *keys: str) -> str | None:
    """Return the digest of some objects together, None where one cannot be read."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    try:
        for key in keys:
            digest.update(storage.read(key, limit))
    except OSError:
        return None
    return digest.hexdigest()
