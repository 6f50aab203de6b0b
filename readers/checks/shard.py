"""Everything that can be checked of one shard, as a task that travels to other processes."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import lru_cache

from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.ledger import state_ledger, token_ledger
from dspark_store.format.metadata import ROOT_KEY
from dspark_store.format.problem import Part, Problem
from dspark_store.format.schema import COLUMNS, IDS, MASK, TOKEN_OBJECTS, object_key
from dspark_store.format.shard import read_tail
from dspark_store.format.storage import Storage
from dspark_store.readers.checks.arrays import check_index
from dspark_store.readers.checks.findings import Findings
from dspark_store.readers.checks.metadata import check_metadata
from dspark_store.readers.checks.rows import LedgerRow, read_ledger_row
from dspark_store.readers.checks.states import check_states
from dspark_store.readers.checks.tokens import check_sources, check_tokens
from dspark_store.readers.checks.view import StoreView


@dataclass(frozen=True, slots=True)
class ShardVerdict:
    """What the check of a shard found: problems, the samples that it holds, and the bytes of chunks that were read."""

    problems: tuple[Problem, ...]
    samples: int
    nbytes: int


class ShardCheck:
    """The check of one shard, called with its number. Picklable: it travels as the store's place."""

    def __init__(self, view: StoreView, run: str | None = None) -> None:
        self._view = view
        self._run = run or secrets.token_hex(8)  # a process keeps a view for one run only: the store may change

    def __reduce__(self) -> tuple[object, ...]:
        return _reopened, (self._view.storage, self._view.quick, self._run)

    def __call__(self, shard: int) -> ShardVerdict:
        """Check a shard."""
        return check_shard(self._view, shard)


@lru_cache(maxsize=2)
def _reopened(storage: Storage, quick: bool, run: str) -> ShardCheck:
    view = open_view(storage, quick=quick)[0]
    if view is None:
        raise OSError(f"the metadata of the store at {storage} cannot be read here any more")
    return ShardCheck(view, run)


def open_view(storage: Storage, *, quick: bool) -> tuple[StoreView | None, list[Problem]]:
    """Read a store's metadata and index; return them, None if they cannot be trusted, and what is wrong with them.

    FileNotFoundError or ValueError where there is no store.
    """
    metadata = check_metadata(storage)
    if metadata.record is None:
        return None, list(metadata.problems)
    index = check_index(storage, metadata.record)
    view = StoreView(storage, metadata.record, metadata.foreign, index.arrays, index.sealed, quick)
    return view, [*metadata.problems, *index.problems]


def check_shard(view: StoreView, shard: int) -> ShardVerdict:
    """Check a shard: ledger rows, tokens, sources, and the states where they are committed."""
    table = view.table_rows(shard)
    growing = view.record.phase == "tokens"
    samples = range(0) if growing else view.schema.tokens.rows(shard)
    findings = Findings(shard, samples)
    token_row = read_ledger_row(view, token_ledger(view.storage), table[0], findings, needed=not growing)
    if growing and not token_row.published:
        return ShardVerdict((), 0, 0)  # a hole, as a repair may leave it: this phase fills it
    if growing:
        findings.samples = samples = _growing_rows(view, token_row, shard)
    tokens = check_tokens(view, token_row, findings)
    if view.schema.sources:
        check_sources(view, tokens, findings)
    _check_cursor(token_row, findings)
    token_row.report(findings)
    nbytes = tokens.nbytes
    complete = view.record.complete
    ledger = state_ledger(view.storage, view.schema)
    state_row = read_ledger_row(view, ledger, table[1], findings, needed=complete)
    if complete or state_row.published:
        nbytes += check_states(view, state_row, tokens, findings)
        state_row.report(findings)
    return ShardVerdict(tuple(dict.fromkeys(findings)), len(samples), nbytes)


def _growing_rows(view: StoreView, row: LedgerRow, shard: int) -> range:
    """Return the samples of a shard while N is not settled: as many as its ledger row says."""
    size = view.schema.shard_size
    count = size if row.row is None else min(int(row.row[2, 1]), size)
    return range(shard * size, shard * size + count)


def _check_cursor(row: LedgerRow, findings: Findings) -> None:
    """Check the entry of a token row that is no object: where the source goes on, and the rows of the shard."""
    if row.row is None:
        return
    if int(row.row[2, 1]) != len(findings.samples):
        text = f"says that the shard has {int(row.row[2, 1])} rows, expected {len(findings.samples)}"
        findings.add(Part.TOKEN_LEDGER, row.key, text, [])
    elif row.table is not None and row.row[2].tolist() != row.table[2].tolist():
        row.wrong_row.append(TOKEN_OBJECTS[2])


def check_identity(view: StoreView, shards: Sequence[int]) -> Iterator[Problem]:
    """Yield a problem of the root when the first and the last objects of all columns agree on another store's id."""
    ids = set()
    for shard in {shards[0], shards[-1]} if shards else ():
        for column in COLUMNS:
            grid = view.schema.tokens if column in (IDS, MASK) else view.schema.states
            with suppress(OSError, DamagedStoreError), closing(view.storage.open(object_key(column, shard))) as reader:
                ids.add(read_tail(reader, grid.slots).label.store_id)
    if len(ids) == 1 and view.record.store_id not in ids:
        message = f"names the store {view.record.store_id}, where the objects belong to {ids.pop()}"
        yield Problem(Part.ROOT, ROOT_KEY, None, (), message)
