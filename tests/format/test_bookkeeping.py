"""The bytes beside the data are those of a store on disk."""

from dataclasses import replace

import pytest

from dspark_store.format.bookkeeping import bookkeeping
from dspark_store.format.objects import Expected, open_object
from dspark_store.format.schema import IDS, MASK, object_key
from dspark_store.format.shard import Place
from tests.stores import Shape, build_store

MANIFEST = {"pad_token_id": 5, "num_hidden_layers": 6, "target_vocab_size": 19}


def size_of(store, folder, name="c."):
    """Return the bytes below a folder of the files whose names begin so, each file once."""
    files = [path.stat() for path in (store.path / folder).rglob(f"{name}*")]
    return sum({stat.st_ino: stat.st_size for stat in files}.values())


def tails_of(store, slots, places):
    total = {}
    for key, place in places:
        found = open_object(store.storage, key, slots, Expected(store.record.store_id, place))
        total[(store.path / key).stat().st_ino] = found.reader.size - int(found.tail.bounds.max())
        found.reader.close()
    return sum(total.values())


@pytest.mark.parametrize("shared_last", [True, False])
def test_every_byte_beside_the_data_is_counted(tmp_path, shared_last):
    layers = (2, -1, 5) if shared_last else (2, -1, 3)
    store = build_store(
        tmp_path / "store",
        shape=Shape(layer_ids=layers, shard_size=4),
        shared_last=shared_last,
        fields={"manifest": MANIFEST},
    )
    schema, shards = store.schema, range(store.schema.tokens.num_shards)
    counted = bookkeeping(replace(store.record, phase="tokens", checksums={}, weights={}))
    assert counted.index == size_of(store, "index")
    assert counted.ledger == size_of(store, "ledger")
    tokens = [(object_key(c, shard), Place(c, 0, None, shard)) for c in (IDS, MASK) for shard in shards]
    states = [(item.key(shard), item.place(shard)) for item in schema.state_objects for shard in shards]
    slack = 4 * len(states)  # digits of the last shard, and of its rows
    assert counted.token_tails == pytest.approx(tails_of(store, schema.tokens, tokens), abs=slack)
    assert counted.state_tails == pytest.approx(tails_of(store, schema.states, states), abs=slack)
    metadata = size_of(store, ".", "zarr.json") + size_of(store, "ledger", "root.json")
    assert counted.metadata == pytest.approx(metadata, abs=1800)  # no job is named in this root and its copy
    assert counted.total == sum(
        (counted.metadata, counted.index, counted.ledger, counted.token_tails, counted.state_tails)
    )
