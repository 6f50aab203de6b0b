"""The token phase: it goes on wherever it was killed, and ends with the index of what it wrote."""

import numpy as np
import pytest

from dspark_store.format.dtypes import cache_dtype
from dspark_store.format.ledger import token_ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.metadata import read_record, write_metadata
from dspark_store.format.schema import StoreSchema
from dspark_store.format.storage import LocalStorage
from dspark_store.format.token_shards import read_token_shard
from dspark_store.precompute.tokenise import tokenise
from dspark_store.readers.index import StoreIndex
from dspark_store.sources.chat import ChatSource
from dspark_store.sources.options import ChatOptions
from dspark_store.sources.source import Sample, SourceError
from dspark_store.writers.recovery import sweep_uncommitted
from tests.sources.words import write_rows

SHARD_SIZE, LENGTH = 3, 8


class ListSource:
    """A source in memory that counts what is read and fails at ``broken``. Its cursors are tenfold record numbers."""

    def __init__(self, count, *, broken=None, skipped=()):
        self.read_records = []
        self._count, self._broken, self._skipped = count, broken, skipped

    def identity(self):
        return {"type": "list"}

    def __len__(self):
        return self._count

    def origins(self):
        return ("",)

    def lengths(self):
        return None

    def record_of(self, cursor):
        return cursor // 10

    def sample(self, record):
        return next(self.read(10 * record))

    def read(self, cursor=0):
        for record in range(cursor // 10, self._count):
            if record == self._broken:
                raise SourceError(f"record {record} cannot be used")
            if record in self._skipped:
                continue
            self.read_records.append(record)
            length = 1 + record % LENGTH
            mask = np.arange(length, dtype=np.uint8) % 2
            yield Sample(np.full(length, record, np.int32), mask, 10 * (record + 1))


def record_of():
    schema = StoreSchema(0, SHARD_SIZE, LENGTH, 4, 1, (0,), cache_dtype("bf16"), "default", LENGTH)
    return StoreRecord("0" * 32, schema, manifest={"num_layers": 1})


def new_store(directory):
    storage = LocalStorage(directory)
    write_metadata(storage, record_of())
    return storage


def ids_of(storage):
    record = read_record(storage)
    return [row.tolist() for shard in range(3) for row in read_token_shard(storage, record, shard).ids]


def expected_ids(count):
    return [[record] * (1 + record % LENGTH) for record in range(count)]


def test_the_phase_writes_every_sample_and_settles_their_number(tmp_path):
    storage = new_store(tmp_path)
    record = tokenise(storage, record_of(), ListSource(8))
    assert (record.phase, record.schema.num_samples, record.manifest["num_samples"]) == ("states", 8, 8)
    assert read_record(storage) == record
    assert ids_of(storage) == expected_ids(8)
    index = StoreIndex(storage, record)
    assert index.length.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert index.supervised.tolist() == [0, 1, 1, 2, 2, 3, 3, 4]


def test_samples_that_fill_their_shards_leave_no_empty_one(tmp_path):
    record = tokenise(new_store(tmp_path), record_of(), ListSource(6))
    assert record.schema.tokens.num_shards == 2
    assert token_ledger(LocalStorage(tmp_path)).committed() == [0, 1]


def test_a_source_that_fails_midway_leaves_whole_shards_and_no_more(tmp_path):
    storage = new_store(tmp_path)
    with pytest.raises(SourceError, match="record 4 cannot be used"):
        tokenise(storage, record_of(), ListSource(8, broken=4))
    assert token_ledger(storage).committed() == [0]
    assert read_record(storage).phase == "tokens"
    assert list(storage.temporaries()) == []


def test_a_failed_phase_goes_on_behind_the_last_committed_shard(tmp_path):
    storage = new_store(tmp_path)
    with pytest.raises(SourceError):
        tokenise(storage, record_of(), ListSource(8, broken=7))
    source = ListSource(8)
    tokenise(storage, record_of(), source)
    assert source.read_records == [6, 7]
    assert ids_of(storage) == expected_ids(8)


@pytest.mark.parametrize(
    ("holes", "read"), [({0}, [0, 1, 2]), ({1}, [3, 4, 5]), ({0, 2}, [0, 1, 2, 6, 7]), ({0, 1, 2}, list(range(8)))]
)
def test_a_hole_is_filled_by_reading_its_records_alone(tmp_path, holes, read):
    storage = new_store(tmp_path)
    whole = tokenise(storage, record_of(), ListSource(8))
    for shard in holes:
        token_ledger(storage).retract(shard)
    sweep_uncommitted(storage, record_of())
    source = ListSource(8)
    again = tokenise(storage, record_of(), source)
    assert source.read_records == read
    assert again == whole
    assert ids_of(storage) == expected_ids(8)


def test_a_hole_that_its_source_no_longer_fills_is_an_error(tmp_path):
    storage = new_store(tmp_path)
    tokenise(storage, record_of(), ListSource(8))
    token_ledger(storage).retract(1)
    sweep_uncommitted(storage, record_of())
    with pytest.raises(SourceError, match="ended at record 5 of 5: it changed"):
        tokenise(storage, record_of(), ListSource(5))


@pytest.mark.parametrize("skipped", [{1}, {3, 4}, {7}, {6, 7}])
def test_records_without_samples_are_passed_over_and_a_resume_goes_on_behind_them(tmp_path, skipped):
    whole = tokenise(new_store(tmp_path / "whole"), record_of(), ListSource(8, skipped=skipped))
    storage = new_store(tmp_path / "resumed")
    with pytest.raises(SourceError):
        tokenise(storage, record_of(), ListSource(8, skipped=skipped - {5}, broken=5))
    again = tokenise(storage, record_of(), ListSource(8, skipped=skipped))
    assert again == whole
    assert again.schema.num_samples == 8 - len(skipped)
    assert StoreIndex(storage, again).length.tolist() == [1 + record for record in range(8) if record not in skipped]


def test_a_source_without_samples_is_refused(tmp_path):
    with pytest.raises(SourceError, match="no samples"):
        tokenise(new_store(tmp_path), record_of(), ListSource(0))


def test_a_hole_inside_rows_that_are_divided_is_filled_exactly(tmp_path):
    rows = [{"input_ids": list(range(row + 1))} for row in range(14)]
    path = write_rows(tmp_path / "rows.jsonl", *rows, {"input_ids": "bad"})

    def source():
        return ChatSource(
            path,
            None,
            ChatOptions(over_long="split", on_bad_row="skip", max_refused=0.1),
            seq_length=LENGTH // 2,
            shuffle_seed=5,
        )

    storage = new_store(tmp_path / "store")
    whole = tokenise(storage, record_of(), source())
    before = [read_token_shard(storage, whole, shard).digests() for shard in range(whole.schema.tokens.num_shards)]
    for shard in (1, 4, 5):
        token_ledger(storage).retract(shard)
    sweep_uncommitted(storage, record_of())
    assert tokenise(storage, record_of(), source()) == whole
    again = [read_token_shard(storage, whole, shard).digests() for shard in range(whole.schema.tokens.num_shards)]
    assert again == before
    assert whole.schema.num_samples == sum(-(-(row + 1) // (LENGTH // 2)) for row in range(14))
