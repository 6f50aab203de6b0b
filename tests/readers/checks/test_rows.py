"""Of an object, its ledger row and its row of the table, the one that the other two contradict is at fault."""

import numpy as np
import pytest

from dspark_store.format.damage import Part
from dspark_store.format.schema import STATE_LEDGER
from dspark_store.format.shard import ObjectRecord
from dspark_store.readers.checks.findings import TABLE_KEY, Findings, LedgerRow

RIGHT, WRONG, OTHER = ObjectRecord(10, 1), ObjectRecord(10, 2), ObjectRecord(11, 3)
KEY = "ledger/states/c.0.0.0"


def row_of(entry):
    return None if entry is None else np.array([[entry.nbytes, entry.digest]], np.uint64)


@pytest.mark.parametrize(
    ("found", "row", "table", "stays", "blamed"),
    [
        (RIGHT, RIGHT, RIGHT, True, []),
        (RIGHT, WRONG, RIGHT, True, [KEY]),
        (RIGHT, RIGHT, WRONG, True, [TABLE_KEY]),
        (WRONG, RIGHT, RIGHT, False, []),
        (OTHER, RIGHT, WRONG, False, [KEY]),
        (RIGHT, RIGHT, None, True, []),
        (RIGHT, None, RIGHT, True, []),
        (WRONG, None, RIGHT, False, []),
        (RIGHT, None, None, True, []),
        (None, RIGHT, RIGHT, True, []),
        (None, WRONG, RIGHT, True, [KEY]),
    ],
)
def test_who_is_at_fault(found, row, table, stays, blamed):
    entries = LedgerRow(STATE_LEDGER, KEY, row_of(row), row_of(table), True, [], [])
    findings = Findings(0, range(3))
    assert entries.settle("layer", 0, found) is stays
    entries.report(findings)
    assert [problem.key for problem in findings] == blamed
    assert all(problem.part in (Part.STATE_LEDGER, Part.INDEX) for problem in findings)


def test_the_sizes_that_an_object_may_have_are_those_of_row_and_table():
    entries = LedgerRow(STATE_LEDGER, KEY, row_of(OTHER), row_of(RIGHT), True, [], [])
    assert entries.sizes(0) == {10, 11}
    assert LedgerRow(STATE_LEDGER, KEY, None, None, True, [], []).sizes(0) == set()
