"""Checking a whole store against its own promises, without the target: what it has once, then shard by shard."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from dspark_store.format.damage import DamagedStoreError, Part, Problem
from dspark_store.format.ledger import state_ledger, token_ledger
from dspark_store.format.metadata import LARGE_SHARD, ROOT_KEY, is_filled
from dspark_store.format.schema import COLUMNS, IDS, MASK, TOKEN_OBJECTS, object_key
from dspark_store.format.shard import read_tail
from dspark_store.format.storage import Storage
from dspark_store.readers.checks.findings import Findings, LedgerRow, StoreView, read_ledger_row
from dspark_store.readers.checks.state_check import check_states
from dspark_store.readers.checks.store_check import check_index, check_metadata, check_promises, check_weights
from dspark_store.readers.checks.strays import check_strays, known_shards
from dspark_store.readers.checks.token_check import check_sources, check_tokens

if TYPE_CHECKING:
    from dspark_store.readers.cache import Cache


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
    """Return the samples of a shard while N is not settled: as many as its ledger row says.

    Of a large shard there are none when neither object of its tokens has an entry for each row.
    """
    size = view.schema.shard_size
    count = size if row.row is None else min(int(row.row[2, 1]), size)
    keys = (object_key(column, shard) for column in (IDS, MASK))
    if count > LARGE_SHARD and not any(is_filled(view.storage, key, size, 16) for key in keys):
        count = 0
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
                ids.add(read_tail(reader, grid).label.store_id)
    if len(ids) == 1 and view.record.store_id not in ids:
        message = f"names the store {view.record.store_id}, where the objects belong to {ids.pop()}"
        yield Problem(Part.ROOT, ROOT_KEY, None, (), message)


@dataclass(frozen=True, slots=True)
class StoreSurvey:
    """What was found about a store as a whole, before any shard is looked at.

    ``view`` is None when the metadata cannot be trusted; then there are no ``shards`` to look at.
    """

    view: StoreView | None
    shards: Sequence[int]
    problems: tuple[Problem, ...]

    def shard_check(self) -> ShardCheck:
        """Return the check of one shard; ValueError when the store has none to check."""
        if self.view is None:
            raise ValueError("a store whose metadata cannot be trusted has no shards to check")
        return ShardCheck(self.view)


def survey_store(storage: Storage, *, quick: bool = False) -> StoreSurvey:
    """Check what a store has once: metadata, index, weights, and objects that belong to no part of it.

    ``quick`` leaves out the chunks of the columns, here and in the checks of the shards that follow. FileNotFoundError
    or ValueError where there is no store at all.
    """
    view, problems = open_view(storage, quick=quick)
    if view is None:
        return StoreSurvey(None, range(0), tuple(problems))
    shards = known_shards(view)
    problems += check_weights(storage, view.record)
    problems += check_promises(problems)
    problems += check_identity(view, shards)
    problems += check_strays(view)
    return StoreSurvey(view, shards, tuple(problems))


def verify_store(cache: Cache, progress: Callable[[int, int], None] | None = None) -> list[Problem]:
    """Check every object of a store that is open for reading: ledger, trailers, chunks, index, weights, metadata.

    The store is opened anew, so that nothing which ``cache`` already holds hides damage.

    Args:
        cache: the store; of a growing one the committed shards are checked.
        progress: called with (shards done, shards) after each shard.

    Returns:
        The problems found, sorted; an empty list for a good store.

    Raises:
        FileNotFoundError: the store is gone.
    """
    survey = survey_store(cache.storage)
    problems = list(survey.problems)
    for done, shard in enumerate(survey.shards, start=1):
        problems += survey.shard_check()(shard).problems
        if progress is not None:
            progress(done, len(survey.shards))
    return sorted(problems, key=lambda problem: problem.order)
