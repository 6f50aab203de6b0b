"""A store with a flipped bit, or with objects in the wrong place, never gives other data: it says what is wrong."""

import shutil
from collections import Counter

import numpy as np
import pytest
from crc32c import crc32c

from dspark_store import open_cache
from dspark_store.format.arrays import pack_array, unpack_array
from dspark_store.format.schema import COLUMNS, LAST, LAYERS
from dspark_store.readers.verify import verify_store
from tests.crash.damage import (
    flipped,
    flips_of_all_kinds,
    kind_of,
    read_everything,
    samples_hit,
)
from tests.writers.small_store import LENGTHS, write_small_store

FLIP_LENGTHS = (7, 16, 1, 12, 9, 3)
SEED = 6


@pytest.fixture(scope="module", params=[None, "int8"], ids=["bf16", "int8"])
def flip_store(request, tmp_path_factory):
    return write_small_store(tmp_path_factory.mktemp("flips") / "store", lengths=FLIP_LENGTHS, int8=request.param)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A store, and one of another run: the same identity, other values; and one of another identity."""
    place = tmp_path_factory.mktemp("originals")
    return {
        "store": write_small_store(place / "store"),
        "again": write_small_store(place / "again", seed=50),
        "other": write_small_store(place / "other", store_id="07e4"),
    }


@pytest.fixture
def store(originals, tmp_path):
    return shutil.copytree(originals["store"], tmp_path / "store")


def named(root, key, message):
    """An object of a column or a ledger is named by its key, of the index or weights by its array, metadata as such."""
    if kind_of(key) in ("root", "metadata"):
        return "zarr.json" in message or str(root) in message
    return (key if kind_of(key) in COLUMNS or key.startswith("ledger") else kind_of(key)) in message


def check_flip(root, flip, whole):
    expected = samples_hit(open_cache(root), flip) if kind_of(flip.key) in COLUMNS else None
    with flipped(root, flip):
        seen = read_everything(root)
    assert all(value == whole.values[name] for name, value in seen.values.items() if name not in seen.failed), flip
    assert seen.refused or seen.problems, f"{flip} was not noticed"
    assert any(named(root, flip.key, message) for message in seen.messages), (flip, seen.messages)
    if expected is not None:
        assert set(seen.failed) == expected, flip
        assert all(f"sample {name[1]} " in message for name, message in seen.failed.items()), (flip, seen.failed)


def check_flips(root, count, record_property):
    whole = read_everything(root)
    assert not whole.messages
    flips = flips_of_all_kinds(root, count, SEED)
    for flip in flips:
        check_flip(root, flip, whole)
    assert read_everything(root) == whole
    record_property("flips", count)
    print(f"{count} of {count} flips noticed")
    print(dict(Counter(kind_of(flip.key) for flip in flips)))


def test_every_flip_of_a_bit_is_noticed_and_none_is_read_as_data(flip_store, record_property):
    check_flips(flip_store, 510, record_property)


@pytest.mark.storm
def test_two_thousand_flips_are_noticed_and_none_is_read_as_data(flip_store, record_property):
    check_flips(flip_store, 2010, record_property)


def swap(root, one, other):
    first, second = (root / one).read_bytes(), (root / other).read_bytes()
    assert first != second
    put(root / one, second)
    put(root / other, first)


def put(path, data):
    """Replace a file under this name only, as a copy would."""
    path.unlink()
    path.write_bytes(data)


def check_only_these_fail(root, originals, names):
    whole, seen = read_everything(originals["store"]), read_everything(root)
    assert not seen.refused
    assert set(seen.failed) == set(names)
    assert all(value == whole.values[name] for name, value in seen.values.items() if name not in seen.failed)
    assert seen.problems


def samples_of(column, *shards):
    return [(column, sample) for shard in shards for sample in range(4 * shard, min(4 * shard + 4, len(LENGTHS)))]


def test_two_layers_of_a_shard_that_were_swapped_are_noticed(store, originals):
    swap(store, f"{LAYERS}/c.1.0.0", f"{LAYERS}/c.1.0.1")
    check_only_these_fail(store, originals, samples_of(LAYERS, 1))


def test_two_shards_of_a_layer_that_were_swapped_are_noticed(store, originals):
    swap(store, f"{LAYERS}/c.0.0.1", f"{LAYERS}/c.1.0.1")
    check_only_these_fail(store, originals, samples_of(LAYERS, 0, 1))


@pytest.mark.parametrize("run", ["again", "other"])
@pytest.mark.parametrize("column", COLUMNS)
def test_an_object_of_another_run_is_noticed(store, originals, column, run):
    (key,) = [f"{column}/{path.name}" for path in (store / column).glob("c.1.0*") if path.name in ("c.1.0", "c.1.0.0")]
    put(store / key, (originals[run] / key).read_bytes())
    check_only_these_fail(store, originals, samples_of(column, 1))


def test_the_states_of_another_layer_in_place_of_the_last_hidden_states_are_noticed(store, originals):
    put(store / f"{LAST}/c.0.0.0", (store / f"{LAYERS}/c.0.0.0").read_bytes())
    check_only_these_fail(store, originals, samples_of(LAST, 0))


@pytest.mark.parametrize("ledger", ["tokens", "states"])
@pytest.mark.parametrize("entry", [0, 1])
def test_an_edited_ledger_row_with_a_right_checksum_is_noticed(store, ledger, entry):
    path = store / f"ledger/{ledger}/c.1.0.0"
    row = unpack_array(path.read_bytes(), "uint64", ((len(path.read_bytes()) - 4) // 16, 2), "row").copy()
    row[0, entry] += 1
    path.write_bytes(pack_array(row))
    problems = verify_store(open_cache(store))
    assert f"ledger/{ledger}/c.1.0.0" in {problem.key for problem in problems}


def test_an_edited_row_of_the_whole_ledger_with_a_right_checksum_is_noticed_by_the_reader(store, originals):
    path = store / "index/objects/c.0.0.0"
    table = unpack_array(path.read_bytes(), "uint64", (3, 7, 2), "table").copy()
    table[1, 3] = table[2, 3]
    path.write_bytes(pack_array(table))
    everything = [name for column in COLUMNS for name in samples_of(column, 0, 1, 2)]
    check_only_these_fail(store, originals, everything)


def test_index_arrays_that_were_swapped_are_noticed(store):
    swap(store, "index/length/c.0", "index/supervised/c.0")
    cache = open_cache(store)
    for read in (lambda: cache.lengths, lambda: cache.supervised, lambda: cache[0]):
        with pytest.raises(ValueError, match="index/"):
            read()


def test_target_tables_that_were_swapped_are_noticed(store, originals):
    swap(store, "target/embed_tokens/weight/c.0.0", "target/lm_head/weight/c.0.0")
    check_only_these_fail(store, originals, [("target", None)])


def test_chunks_of_a_target_table_that_were_swapped_are_noticed(tmp_path):
    root = write_small_store(tmp_path / "store", lengths=(3,), vocab=2 * 4 * 1024 * 1024 // 16)
    swap(root, "target/embed_tokens/weight/c.0.0", "target/embed_tokens/weight/c.1.0")
    assert list(read_everything(root).failed) == [("target", None)]


@pytest.mark.parametrize("column", [LAYERS, LAST])
def test_chunks_of_two_samples_that_were_swapped_in_an_object_are_noticed(store, originals, column):
    path = store / f"{column}/c.0.0.0"
    slots, data = 8, bytearray(path.read_bytes())
    index = np.frombuffer(data[-16 * slots - 4 : -4], "<u8").reshape(slots, 2).copy()
    index[[2, 6]] = index[[6, 2]]
    data[-16 * slots - 4 :] = index.tobytes() + crc32c(index.tobytes()).to_bytes(4, "little")
    put(path, bytes(data))
    check_only_these_fail(store, originals, samples_of(column, 0))


def test_an_object_that_is_gone_is_noticed(store, originals):
    (store / f"{LAYERS}/c.2.0.1").unlink()
    check_only_these_fail(store, originals, samples_of(LAYERS, 2))
