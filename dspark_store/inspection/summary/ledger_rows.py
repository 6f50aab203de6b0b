"""The rows of a store's ledgers: as many as are needed, read by threads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import batched

import numpy as np

from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.ledger import Ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import STATE_LEDGER, TOKEN_LEDGER, TOKEN_OBJECTS
from dspark_store.format.storage import Storage
from dspark_store.inspection.damage import told
from dspark_store.readers.index import StoreIndex

MOST_ROWS = 4096
"""So many rows of a ledger are read at most: each is a file, and a million of them would take minutes."""
_ROWS_A_TASK, _THREADS = 64, 16
_SHARDS_AT_LEAST = 1 << 20
"""While tokens are written, rows of shards far beyond the number of rows are no part of the store."""


@dataclass(frozen=True, slots=True)
class LedgerRows:
    """Rows of one ledger: ``rows``, (n, objects, 2) uint64, are those of ``shards``, ascending.

    ``committed`` are all shards that it has, of which those are the ones that were read.
    """

    committed: Sequence[int]
    shards: Sequence[int]
    rows: np.ndarray


def read_ledgers(
    storage: Storage, record: StoreRecord, index: StoreIndex, damage: list[str]
) -> tuple[LedgerRows, LedgerRows]:
    """Return the rows of the token ledger and of the state ledger; those of a complete store are in its index.

    At most `MOST_ROWS` of a growing store's are read, evenly spread. For rows that are not as written a line is added
    to ``damage``.
    """
    objects = told(lambda: index.objects, damage) if record.complete else None
    if objects is not None:
        shards, tokens = range(len(objects)), len(TOKEN_OBJECTS)
        return LedgerRows(shards, shards, objects[:, :tokens]), LedgerRows(shards, shards, objects[:, tokens:])
    # States are committed after their tokens: so none is found whose tokens were not there when these were listed.
    states = _read_ledger(storage, record, STATE_LEDGER, len(record.schema.state_objects), damage)
    return _read_ledger(storage, record, TOKEN_LEDGER, len(TOKEN_OBJECTS), damage), states


def _read_ledger(storage: Storage, record: StoreRecord, path: str, objects: int, damage: list[str]) -> LedgerRows:
    ledger = Ledger(storage, path, objects)
    found_there = ledger.committed()
    most = max(_SHARDS_AT_LEAST, 2 * len(found_there))
    if record.phase != "tokens":
        most = record.schema.tokens.num_shards
    committed = [shard for shard in found_there if shard < most]
    if record.phase == "tokens" and len(committed) < len(found_there):
        damage.append(f"{path} has a row of shard {found_there[-1]}, where {len(found_there):,} shards are there")
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ledger") as pool:
        tasks = batched(spread(committed, MOST_ROWS), _ROWS_A_TASK)
        parts = list(pool.map(lambda shards: _read_rows(ledger, shards), tasks))
    found = [row for rows, _ in parts for row in rows]
    bad = [line for _, lines in parts for line in lines]
    if bad:
        damage.append(f"{len(bad)} of the rows of {path} cannot be read: {bad[0]}")
    rows = np.stack([row for _, row in found]) if found else np.empty((0, objects, 2), np.uint64)
    return LedgerRows(committed, [shard for shard, _ in found], rows)


def _read_rows(ledger: Ledger, shards: Sequence[int]) -> tuple[list[tuple[int, np.ndarray]], list[str]]:
    found, damage = [], []
    for shard in shards:
        try:
            found.append((shard, ledger.row(shard)))
        except FileNotFoundError:  # its writer has taken the shard back since it was listed
            continue
        except (DamagedStoreError, OSError) as error:
            damage.append(str(error))
    return found, damage


def spread(shards: Sequence[int], most: int) -> list[int]:
    """Return at most ``most`` of some shards, evenly spread, the first and the last among them."""
    if len(shards) <= most:
        return list(shards)
    return [shards[place] for place in np.linspace(0, len(shards) - 1, most).round().astype(int).tolist()]
