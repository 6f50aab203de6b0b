import numpy as np
import pytest
import zarr

from dspark_store import open_cache
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.schema import LAST, LAYERS
from dspark_store.format.storage import LocalStorage
from dspark_store.readers.verify import verify_store
from dspark_store.writers.pipeline import EncodePipeline
from dspark_store.writers.publish import complete_store, settle_tokens
from dspark_store.writers.tokens import write_token_shard
from tests.writers.small_store import (
    BUFFER_BYTES,
    LENGTHS,
    SHARD_SIZE,
    random_states,
    random_tokens,
    shards_of,
    small_record,
    write_small_store,
    write_states,
    write_tokens,
)


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path / "store")


def write_all_states(storage, record, *, tokens=None, seed=0):
    with EncodePipeline(1, BUFFER_BYTES) as pipeline:
        for shard, part in enumerate(shards_of(LENGTHS)):
            digest = tokens or random_tokens(part, shard).digest
            write_states(storage, record, shard, part, pipeline, tokens=digest, seed=seed)


def with_all_states(storage, **options):
    record = write_tokens(storage, small_record())
    write_all_states(storage, record, **options)
    return record


def stored_files(storage):
    return {path.relative_to(storage.root): path.read_bytes() for path in storage.root.rglob("*") if path.is_file()}


def test_settling_gives_every_array_its_final_number_of_samples(storage):
    record = write_tokens(storage, small_record())
    assert (record.phase, record.schema.num_samples, record.manifest["num_samples"]) == ("states", 10, 10)
    for column in ("input_ids", "loss_mask", LAYERS, LAST):
        assert zarr.open_array(storage.path(column), mode="r").shape[0] == 10


def test_settling_derives_the_index_from_the_shards(storage):
    write_tokens(storage, small_record())
    cache = open_cache(storage.root, allow_incomplete=True)
    rows = [random_tokens(part, shard) for shard, part in enumerate(shards_of(LENGTHS))]
    assert cache.lengths.tolist() == list(LENGTHS)
    assert cache.supervised.tolist() == [int(mask.sum()) for shard in rows for mask in shard.masks]
    assert cache.index.digest.tobytes() == b"".join(digest for shard in rows for digest in shard.digests())


def test_settling_again_changes_nothing(storage):
    write_tokens(storage, small_record())
    before = stored_files(storage)
    settle_tokens(storage, small_record())
    assert stored_files(storage) == before


def test_a_hole_among_the_token_shards_is_refused(storage):
    for shard in (0, 2):
        write_token_shard(storage, small_record(), shard, random_tokens((3,) * SHARD_SIZE, shard), cursor=0)
    with pytest.raises(DamagedStoreError, match=r"token shards \[0, 2\]"):
        settle_tokens(storage, small_record())


def test_a_short_token_shard_before_the_last_is_refused(storage):
    for shard, rows in enumerate((2, SHARD_SIZE)):
        write_token_shard(storage, small_record(), shard, random_tokens((3,) * rows, shard), cursor=0)
    with pytest.raises(DamagedStoreError, match="not a whole sequence"):
        settle_tokens(storage, small_record())


def test_a_completed_store_opens_and_is_good(storage):
    complete_store(storage, with_all_states(storage))
    cache = open_cache(storage.root)
    assert verify_store(cache) == []
    assert cache.status.tolist() == [0] * len(LENGTHS)


def test_a_store_is_refused_until_it_is_completed(storage):
    with_all_states(storage)
    with pytest.raises(ValueError, match="incomplete"):
        open_cache(storage.root)


def test_completing_again_changes_nothing(storage):
    record = with_all_states(storage)
    complete_store(storage, record)
    before = stored_files(storage)
    complete_store(storage, record)
    assert stored_files(storage) == before


@pytest.mark.parametrize(("ledger", "name"), [("tokens", "token"), ("states", "state")])
@pytest.mark.parametrize("shard", [0, 2])
def test_a_missing_shard_is_refused(storage, ledger, name, shard):
    record = with_all_states(storage)
    storage.delete(f"ledger/{ledger}/c.{shard}.0.0")
    with pytest.raises(DamagedStoreError, match=rf"{name} shard indices .* are not 0\.\.2"):
        complete_store(storage, record)


def test_a_missing_object_is_refused(storage):
    record = with_all_states(storage)
    storage.delete(f"{LAYERS}/c.1.0.0")
    with pytest.raises(DamagedStoreError, match=rf"object {LAYERS}/c\.1\.0\.0 is missing"):
        complete_store(storage, record)


@pytest.mark.parametrize("other", [f"{LAYERS}/c.1.0.1", f"{LAYERS}/c.0.0.0", f"{LAST}/c.1.0.0"])
def test_an_object_of_another_place_is_refused(storage, other):
    record = with_all_states(storage)
    storage.put(f"{LAYERS}/c.1.0.0", storage.read(other))
    with pytest.raises(DamagedStoreError, match=rf"object {LAYERS}/c\.1\.0\.0 belongs to"):
        complete_store(storage, record)


def test_an_object_of_another_run_is_refused(storage, tmp_path):
    other = LocalStorage(write_small_store(tmp_path / "other", store_id="07e4"))
    record = with_all_states(storage)
    storage.put(f"{LAST}/c.1.0.0", other.read(f"{LAST}/c.1.0.0"))
    with pytest.raises(DamagedStoreError, match=r"belongs to another store \(07e4, expected 5ma11\)"):
        complete_store(storage, record)


def test_an_object_of_the_same_place_with_other_values_is_refused(storage, tmp_path):
    other = LocalStorage(tmp_path / "other")
    with_all_states(other, seed=9)
    record = with_all_states(storage)
    storage.put(f"{LAST}/c.1.0.0", other.read(f"{LAST}/c.1.0.0"))
    with pytest.raises(DamagedStoreError, match="is not the one in the ledger"):
        complete_store(storage, record)


def test_states_that_were_computed_from_other_tokens_are_refused(storage):
    record = with_all_states(storage, tokens="f" * 32)
    with pytest.raises(DamagedStoreError, match="was computed from other tokens"):
        complete_store(storage, record)


def test_damaged_tokens_are_refused(storage):
    record = with_all_states(storage)
    data = bytearray(storage.read("input_ids/c.1.0"))
    data[20] ^= 1
    storage.put("input_ids/c.1.0", bytes(data))
    with pytest.raises(DamagedStoreError, match=r"object input_ids/c\.1\.0"):
        complete_store(storage, record)


def test_a_refused_store_stays_incomplete(storage):
    record = with_all_states(storage)
    storage.delete(f"{LAST}/c.2.0.0")
    with pytest.raises(DamagedStoreError):
        complete_store(storage, record)
    with pytest.raises(ValueError, match="incomplete"):
        open_cache(storage.root)


def test_samples_that_are_not_finite_are_marked(storage, monkeypatch):
    def states_with_a_nan(length, seed):
        layers, last = random_states(length, seed)
        if seed == 101:
            layers[1][0, 0] = float("nan")
        return layers, last

    monkeypatch.setattr("tests.writers.small_store.random_states", states_with_a_nan)
    complete_store(storage, with_all_states(storage))
    assert np.flatnonzero(open_cache(storage.root).status).tolist() == [SHARD_SIZE + 1]
