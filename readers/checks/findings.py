"""What a shard is checked against, and what the checks find: the store under examination, ledger rows, problems."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from dspark_store.format.damage import DamagedStoreError, Part, Problem
from dspark_store.format.grid import ShardGrid
from dspark_store.format.ledger import Ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.objects import Expected, Scratch, StoredObject
from dspark_store.format.schema import (
    INDEX_DIGEST,
    INDEX_OBJECTS,
    STATE_LEDGER,
    TOKEN_LEDGER,
    TOKEN_OBJECTS,
    StateObject,
    StoreSchema,
)
from dspark_store.format.shard import ObjectRecord, read_tail
from dspark_store.format.storage import Storage


@dataclass(frozen=True, slots=True, eq=False)
class StoreView:
    """A store under examination.

    ``foreign`` are the columns without trailers. ``index`` holds the arrays of the index by path that could be read,
    ``sealed`` the paths of those that are the ones that the root promises. With ``quick`` no chunk is read.
    """

    storage: Storage
    record: StoreRecord
    foreign: frozenset[str]
    index: Mapping[str, np.ndarray]
    sealed: frozenset[str]
    quick: bool

    @property
    def schema(self) -> StoreSchema:
        """The shape of the store."""
        return self.record.schema

    def rows_of(self, path: str, samples: range) -> np.ndarray | None:
        """Return an index array's entries of some samples; None when the store has none, or it cannot be read."""
        values = self.index.get(path)
        return None if values is None else values[samples.start : samples.stop]

    def digests_of(self, samples: range) -> list[bytes] | None:
        """Return the samples' digests as the index has them."""
        values = self.rows_of(INDEX_DIGEST, samples)
        return None if values is None else [row.tobytes() for row in values]

    def table_rows(self, shard: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return a shard's rows of ``index/objects``, those of the tokens and those of the states, or None twice."""
        table = self.index.get(INDEX_OBJECTS)
        if table is None:
            return None, None
        return table[shard, : len(TOKEN_OBJECTS)], table[shard, len(TOKEN_OBJECTS) :]


def describe_error(error: Exception, key: str) -> str:
    """Return what an error says of an object, without its key."""
    if isinstance(error, FileNotFoundError):
        return "is missing"
    if isinstance(error, OSError) and not isinstance(error, DamagedStoreError):
        return f"cannot be read: {error.strerror or error}"
    return str(error).removeprefix(f"object {key} ")


def entry(row: np.ndarray | None, position: int) -> ObjectRecord | None:
    """Return one object's entry of a ledger row, None of a row that is not there."""
    return None if row is None else ObjectRecord(int(row[position, 0]), int(row[position, 1]))


@dataclass(slots=True)
class Findings:
    """Problems of one shard, whose samples are ``samples``."""

    shard: int
    samples: range
    _problems: list[Problem] = field(default_factory=list)
    _all: tuple[int, ...] = ()
    """The samples, once for all problems that hit them all."""

    def add(self, part: Part, key: str, message: str, rows: Iterable[int] | None = None) -> None:
        """Report an object; ``rows`` are the rows of the shard that are hit, by default all."""
        if rows is not None:
            samples = tuple(self.samples.start + row for row in sorted(set(rows)))
        else:
            samples = self._all = self._all if len(self._all) == len(self.samples) else tuple(self.samples)
        self._problems.append(Problem(part, key, self.shard, samples, message))

    def add_rows(self, part: Part, key: str, messages: dict[int, str]) -> None:
        """Report rows of an object, each with its message; nothing when there are none."""
        if messages:
            first, *others = [messages[row] for row in sorted(messages)]
            more = f" (and {len(others)} more)" if others else ""
            self.add(part, key, first + more, messages)

    def __iter__(self) -> Iterator[Problem]:
        return iter(self._problems)


SCRATCH = Scratch()
"""The buffers of each thread that checks."""
TABLE_KEY = f"{INDEX_OBJECTS}/c.0.0.0"
_PARTS = {TOKEN_LEDGER: Part.TOKEN_LEDGER, STATE_LEDGER: Part.STATE_LEDGER}


@dataclass(slots=True)
class LedgerRow:
    """The entries of one shard in a ledger, and the copy of them in the table of a complete store.

    ``row`` and ``table`` are (objects, 2) uint64, None where there is none or it cannot be read. ``published`` tells
    whether the row is there at all, ``wrong`` collects the objects for which the row, or the table, is at fault.
    """

    path: str
    key: str
    row: np.ndarray | None
    table: np.ndarray | None
    published: bool
    wrong_row: list[str]
    wrong_table: list[str]

    def sizes(self, position: int) -> set[int]:
        """Return the sizes that row and table give an object: one, none where there are neither, two if they differ."""
        return {known.nbytes for row in (self.row, self.table) if (known := entry(row, position)) is not None}

    def settle(self, name: str, position: int, found: ObjectRecord | None) -> bool:
        """Compare an object that was ``found`` whole (None: it was not) with its entries; return whether it may stay.

        Of object, row and table, the one that the other two contradict is at fault.
        """
        entries = entry(self.row, position), entry(self.table, position)
        if None not in entries and entries[0] != entries[1]:
            (self.wrong_table if found == entries[0] else self.wrong_row).append(name)
        known = [known for known in entries if known is not None]
        return found is None or not known or found in known

    def report(self, findings: Findings) -> None:
        """Report the row and the table, if they are at fault."""
        if self.wrong_row:
            message = f"differs from the shard's objects and {INDEX_OBJECTS} in {', '.join(self.wrong_row)}"
            findings.add(_PARTS[self.path], self.key, message, [])
        if self.wrong_table:
            message = f"differs from the shard's objects and {self.path} in {', '.join(self.wrong_table)}"
            findings.add(Part.INDEX, TABLE_KEY, message)


def read_ledger_row(
    view: StoreView, ledger: Ledger, table: np.ndarray | None, findings: Findings, *, needed: bool
) -> LedgerRow:
    """Read a shard's row of a ledger; report it when it is damaged, or when it is missing though ``needed``."""
    key, part = ledger.key(findings.shard), _PARTS[ledger.path]
    row, published = None, True
    try:
        row = ledger.row(findings.shard)
    except FileNotFoundError:
        published = False
        if needed:
            findings.add(part, key, "is missing", [])
    except (OSError, DamagedStoreError) as error:
        findings.add(part, key, describe_error(error, key), [] if view.record.complete else None)
    return LedgerRow(ledger.path, key, row, table, published, [], [])


def open_checked(
    storage: Storage, key: str, grid: ShardGrid, expected: Expected, rows: int, sizes: Collection[int] = ()
) -> StoredObject:
    """Open an object and check its tail: size, label, layout and number of rows.

    ``sizes`` are those that it may have, any if there are none. DamagedStoreError or OSError, without the key, when it
    is missing or not what is expected.
    """
    reader = storage.open(key)
    try:
        if sizes and reader.size not in sizes:
            raise DamagedStoreError(f"has {reader.size:,} bytes, the ledger says {min(sizes):,}")
        tail = read_tail(reader, grid)
        expected.check(tail)
        if tail.label.rows != rows:
            raise DamagedStoreError(f"holds {tail.label.rows} rows, expected {rows}")
    except BaseException:
        reader.close()
        raise
    return StoredObject(key, reader, tail)


def open_settled(
    view: StoreView,
    item: StateObject,
    position: int,
    ledger: LedgerRow,
    findings: Findings,
    *,
    tokens: str | None = None,
) -> StoredObject | None:
    """Open a shard's object of a column; report it, and return None, unless it is whole and the one in the ledger.

    ``position`` is that of its entry in the ledger row, ``tokens`` the digest of those that it was computed from.
    """
    is_token = item.column in TOKEN_OBJECTS
    part, grid = (Part.TOKENS, view.schema.tokens) if is_token else (Part.STATES, view.schema.states)
    key, stored = item.key(findings.shard), None
    expected = Expected(view.record.store_id, item.place(findings.shard), tokens=tokens)
    try:
        stored = open_checked(view.storage, key, grid, expected, len(findings.samples), ledger.sizes(position))
    except (OSError, DamagedStoreError) as error:
        findings.add(part, key, describe_error(error, key))
    if ledger.settle(item.name, position, None if stored is None else stored.tail.record):
        return stored
    findings.add(part, key, "is not the one in the ledger")
    return None
