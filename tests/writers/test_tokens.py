import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.files import LocalObjectWriter
from dspark_store.format.ledger import token_ledger
from dspark_store.format.storage import LocalStorage
from dspark_store.format.token_shards import TokenRows, read_token_shard
from dspark_store.writers.tokens import write_token_shard
from tests.writers.small_store import SEQ_LENGTH, SHARD_SIZE, random_tokens, small_record

RECORD = small_record()


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path / "store")


@pytest.fixture
def rows():
    return random_tokens((7, 16, 1, 12), seed=0)


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs)
    for values, expected in zip([*ours.ids, *ours.masks], [*theirs.ids, *theirs.masks], strict=True):
        np.testing.assert_array_equal(values, expected)


@given(lengths=st.lists(st.integers(0, SEQ_LENGTH), min_size=1, max_size=SHARD_SIZE), seed=st.integers(0, 99))
def test_tokens_of_any_lengths_come_back(tmp_path_factory, lengths, seed):
    storage = LocalStorage(tmp_path_factory.mktemp("tokens"))
    rows = random_tokens(lengths, seed)
    write_token_shard(storage, RECORD, 5, rows, cursor=23)
    assert_equal(read_token_shard(storage, RECORD, 5), rows)


def test_a_committed_shard_tells_where_the_source_goes_on(storage, rows):
    write_token_shard(storage, RECORD, 2, rows, cursor=12)
    assert token_ledger(storage).committed() == [2]
    assert token_ledger(storage).row(2)[2].tolist() == [12, 4]


def test_a_second_committer_of_a_shard_loses(storage, rows):
    write_token_shard(storage, RECORD, 0, rows, cursor=4)
    with pytest.raises(FileExistsError):
        write_token_shard(storage, RECORD, 0, rows, cursor=4)


def test_the_same_tokens_give_the_same_objects(tmp_path, rows):
    one, other = LocalStorage(tmp_path / "one"), LocalStorage(tmp_path / "other")
    for storage in (one, other):
        write_token_shard(storage, RECORD, 0, rows, cursor=4)
    for key in ("input_ids/c.0.0", "loss_mask/c.0.0", "ledger/tokens/c.0.0.0"):
        assert one.read(key) == other.read(key)


def test_the_digest_sees_ids_masks_and_where_rows_end():
    ids, masks = [np.array([1, 2, 3], np.int32)], [np.array([0, 1, 1], np.uint8)]
    digests = {
        TokenRows(ids, masks).digest,
        TokenRows([ids[0] + 1], masks).digest,
        TokenRows(ids, [1 - masks[0]]).digest,
        TokenRows([ids[0][:2], ids[0][2:]], [masks[0][:2], masks[0][2:]]).digest,
    }
    assert len(digests) == 4


def test_a_shard_that_is_not_committed_is_not_read(storage):
    with pytest.raises(FileNotFoundError):
        read_token_shard(storage, RECORD, 0)


def test_a_failed_write_leaves_no_file_and_no_row(storage, rows, monkeypatch):
    def full(self, *parts):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalObjectWriter, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write_token_shard(storage, RECORD, 0, rows, cursor=4)
    assert [path for path in storage.root.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("column", ["input_ids", "loss_mask"])
def test_tokens_of_another_shard_in_its_place_are_refused(storage, rows, column):
    write_token_shard(storage, RECORD, 0, rows, cursor=4)
    write_token_shard(storage, RECORD, 1, random_tokens((7, 16, 1, 12), seed=1), cursor=8)
    storage.put(f"{column}/c.0.0", storage.read(f"{column}/c.1.0"))
    with pytest.raises(DamagedStoreError, match=rf"object {column}/c\.0\.0 belongs to"):
        read_token_shard(storage, RECORD, 0)


def test_a_missing_object_is_named(storage, rows):
    write_token_shard(storage, RECORD, 0, rows, cursor=4)
    storage.delete("loss_mask/c.0.0")
    with pytest.raises(DamagedStoreError, match=r"object loss_mask/c\.0\.0 is missing"):
        read_token_shard(storage, RECORD, 0)
