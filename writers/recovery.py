"""What an interrupted run leaves behind, and its removal."""

from __future__ import annotations

import contextlib
import re

from dspark_store.format.ledger import state_ledger, token_ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import IDS, LAST, LAYERS, MASK
from dspark_store.format.storage import LocalStorage, Storage
from dspark_store.writers.lock import LOCK_KEY, StoreLock

_OBJECT_NAME = re.compile(r"c\.(\d+)(\.\d+)+")


def sweep_uncommitted(storage: Storage, record: StoreRecord) -> int:
    """Remove temporary files and every object whose shard has no ledger row; return how many were removed.

    Only the holder of the store's lock may call it.
    """
    swept = storage.sweep()
    tokens, states = token_ledger(storage), state_ledger(storage, record.schema)
    ledgers = {LAST: states, LAYERS: states}
    if record.phase == "tokens":  # settled ones are never made again: a row that is missing is damage, not a leftover
        ledgers |= {IDS: tokens, MASK: tokens}
    for column, ledger in ledgers.items():
        committed = set(ledger.committed())
        for name in storage.list(column):
            match = _OBJECT_NAME.fullmatch(name)
            if match is None or int(match.group(1)) in committed:
                continue
            if storage.exists(ledger.key(int(match.group(1)))):  # asked again: time may have passed, and the lock too
                continue
            storage.delete(f"{column}/{name}")
            swept += 1
    return swept


def sweep_finished(storage: LocalStorage, record: StoreRecord) -> int:
    """Clean a complete store after a job that was killed between sealing it and giving its lock back.

    Returns how many pieces were removed beside the lock. Nothing is touched when there is no lock, or a live one: a job
    that is still ending removes its own.
    """
    if storage.exists(LOCK_KEY):
        with contextlib.suppress(BlockingIOError), StoreLock(storage):
            return sweep_uncommitted(storage, record)
    return 0
