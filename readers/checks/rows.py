"""A shard's ledger rows and row of ``index/objects``, and who is wrong when they and an object disagree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.ledger import Ledger
from dspark_store.format.problem import Part
from dspark_store.format.schema import INDEX_OBJECTS, STATE_LEDGER, TOKEN_LEDGER
from dspark_store.format.shard import ObjectRecord
from dspark_store.readers.checks.arrays import told
from dspark_store.readers.checks.findings import Findings
from dspark_store.readers.checks.view import StoreView, entry

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
        findings.add(part, key, told(error, key), [] if view.record.complete else None)
    return LedgerRow(ledger.path, key, row, table, published, [], [])
