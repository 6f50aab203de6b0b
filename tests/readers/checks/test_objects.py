"""An object's chunks come in the order of its bytes, and two of object, ledger row and table say who is at fault."""

import numpy as np
import pytest

from dspark_store.format.codecs import plain_chain
from dspark_store.format.damage import DamagedStoreError, Part
from dspark_store.format.grid import ShardGrid
from dspark_store.format.objects import Expected
from dspark_store.format.schema import STATE_LEDGER
from dspark_store.format.shard import ObjectLabel, ObjectRecord, Place, ShardWriter
from dspark_store.format.storage import LocalStorage
from dspark_store.readers.checks.findings import SCRATCH, TABLE_KEY, Findings, LedgerRow, open_checked

GRID = ShardGrid(3, 3, 8, 4)
PLACE = Place("x", 0, None, 0)
EXPECTED = Expected("id", PLACE)
CHUNKS = {slot: np.full(2**18, slot, "<u4") for slot in (4, 5, 0, 2)}  # a MiB each: a window holds one


@pytest.fixture
def storage(tmp_path):
    """An object whose rows stand in another order than their numbers."""
    storage = LocalStorage(tmp_path)
    writer = ShardWriter(storage.create("x/c.0"), GRID.slots)
    for slot, values in CHUNKS.items():
        writer.append(slot, plain_chain(4).encode(values))
    writer.finish(ObjectLabel("id", (PLACE,), 3, "00"))
    return storage


def test_chunks_come_in_the_order_of_the_bytes(storage):
    opened = open_checked(storage, "x/c.0", GRID, EXPECTED, 3)
    seen = {slot: bytes(chunk[:-4]) for slot, chunk in opened.chunks(SCRATCH)}
    assert list(seen) == [4, 5, 0, 2]
    assert seen == {slot: values.tobytes() for slot, values in CHUNKS.items()}
    opened.reader.close()


@pytest.mark.parametrize(
    ("rows", "sizes", "message"),
    [(2, (), "holds 3 rows, expected 2"), (3, (7,), r"has [\d,]+ bytes, the ledger says 7")],
)
def test_another_number_of_rows_or_bytes_is_refused(storage, rows, sizes, message):
    with pytest.raises(DamagedStoreError, match=message):
        open_checked(storage, "x/c.0", GRID, EXPECTED, rows, sizes)


def test_two_chunks_over_the_same_bytes_are_refused(tmp_path):
    """The sizes add up to those of the data, but one chunk lies over another and a gap is left."""
    storage = LocalStorage(tmp_path)
    writer = ShardWriter(storage.create("x/c.0"), GRID.slots)
    for slot in (0, 2, 4):
        writer.append(slot, plain_chain(4).encode(np.full(4, slot, "<u4")))
    writer._index[2, 0] = writer._index[0, 0]
    writer.finish(ObjectLabel("id", (PLACE,), 3, "00"))
    with pytest.raises(DamagedStoreError, match="does not cover"):
        open_checked(storage, "x/c.0", GRID, EXPECTED, 3)


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
