"""Format versions 1 and 2, pinned: today's code reads the committed stores, and writes them again."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_store import Cache, open_cache, read_weights, verify_store
from dspark_store.format.grid import ShardGrid
from dspark_store.format.manifest import ATTRIBUTE, parse_record, seal_digest
from dspark_store.format.metadata import COPY_KEY, ROOT_KEY, node_key, record_nodes
from dspark_store.format.schema import IDS, LAST, LAYERS, MASK, group_document, metadata_bytes
from dspark_store.format.shard import read_tail
from dspark_store.format.storage import LocalStorage
from tests.golden.make import GOLDEN, Golden
from tests.stores import bits

V1 = Path(__file__).with_name("v1")
EVERY_STORE = pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.name)
FOLLOWS_THE_CODEC = ("checksums", "seal")
"""Attributes that change with the bytes that a compression library makes."""


@dataclass(frozen=True)
class Contents:
    """What a golden store must hold."""

    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]


def expected(golden: Golden, directory: Path | None = None) -> Contents:
    directory = directory or golden.place
    with np.load(directory / f"{golden.name}.npz") as arrays:
        return Contents(dict(arrays), json.loads((directory / f"{golden.name}.json").read_text(encoding="utf-8")))


def opened(golden: Golden) -> Cache:
    return open_cache(golden.place / golden.name)


def files(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def files_of_before(root: Path) -> dict[str, bytes]:
    """Return the files of a store written today, less what was added to version 1 since: a copy of the root."""
    today = files(root)
    assert today.pop(COPY_KEY) == today[ROOT_KEY]
    attributes = json.loads(today[ROOT_KEY])["attributes"][ATTRIBUTE]
    assert attributes.pop("root_copy") == COPY_KEY
    nodes = {path: json.loads(today[node_key(path)]) for path in record_nodes(parse_record(attributes, "a test"))}
    attributes["seal"] = seal_digest(attributes, nodes)
    return {**today, ROOT_KEY: metadata_bytes(group_document({ATTRIBUTE: attributes}))}


@EVERY_STORE
def test_the_samples_of_a_golden_store_are_read(golden: Golden) -> None:
    cache, arrays = opened(golden), expected(golden).arrays
    first = 0
    for row, length in enumerate(arrays["lengths"]):
        batch = cache.read([row], positions=slice(0, int(length)), layout="stacked")
        span = slice(first, first + length)
        assert np.array_equal(batch[IDS][0], arrays["ids"][span])
        assert np.array_equal(batch[MASK][0], arrays["mask"][span])
        assert np.array_equal(bits(batch[LAYERS][0]), arrays["layers"][:, span])
        assert np.array_equal(bits(batch[LAST][0]), arrays["last"][span])
        first += length
    assert len(cache) == len(arrays["lengths"])


@EVERY_STORE
def test_the_weights_of_a_golden_store_are_read(golden: Golden) -> None:
    cache, arrays = opened(golden), expected(golden).arrays
    weights = read_weights(cache.storage, cache.record)
    assert np.array_equal(bits(weights.embed), arrays["embed"])
    assert np.array_equal(bits(weights.head), arrays["head"])


@EVERY_STORE
def test_the_facts_of_a_golden_store_are_read(golden: Golden) -> None:
    cache, facts = opened(golden), expected(golden).facts
    assert cache.manifest == facts["manifest"]
    assert cache.record.store_id == facts["store_id"]
    assert cache.status.tolist() == facts["status"]
    assert cache.lengths.tolist() == expected(golden).arrays["lengths"].tolist()
    assert cache.target_config == {"hidden_size": 4, "num_hidden_layers": 4, "rms_norm_eps": 1e-06}


@EVERY_STORE
def test_a_golden_store_has_no_problems(golden: Golden) -> None:
    assert verify_store(opened(golden)) == []


@EVERY_STORE
def test_what_a_golden_store_must_hold_has_not_changed(golden: Golden, tmp_path: Path) -> None:
    golden.make(tmp_path)
    today, before = expected(golden, tmp_path), expected(golden)
    assert today.facts == before.facts
    assert today.arrays.keys() == before.arrays.keys()
    assert all(np.array_equal(today.arrays[name], values) for name, values in before.arrays.items())


def test_plain_objects_and_metadata_are_written_byte_by_byte_as_before(tmp_path: Path) -> None:
    golden = next(golden for golden in GOLDEN if golden.codec == "none")
    golden.make(tmp_path)
    assert files_of_before(tmp_path / golden.name) == files(golden.place / golden.name)


@EVERY_STORE
def test_a_store_written_today_has_the_files_and_the_metadata_of_the_golden_one(golden: Golden, tmp_path: Path) -> None:
    golden.make(tmp_path)
    written = files_of_before if golden.place == V1 else files
    today, before = written(tmp_path / golden.name), files(golden.place / golden.name)
    assert today.keys() == before.keys()
    for name in before:
        if name.endswith("zarr.json") or (name.startswith("index/") and name != "index/objects/c.0.0.0"):
            assert without_codec_bytes(today[name]) == without_codec_bytes(before[name]), name


def without_codec_bytes(data: bytes) -> object:
    """Parse metadata, leaving out what follows the codec's bytes; other objects are compared as they are."""
    if not data.startswith(b"{"):
        return data
    document = json.loads(data)
    attributes = document["attributes"].get(ATTRIBUTE, {})
    return document, [attributes.pop(name, None) is None for name in FOLLOWS_THE_CODEC]


@EVERY_STORE
def test_objects_written_today_have_the_golden_ones_labels_and_chunks(golden: Golden, tmp_path: Path) -> None:
    golden.make(tmp_path)
    slots = {IDS: 2, MASK: 2, LAYERS: 4, LAST: 4}
    for column, count in slots.items():
        for name in LocalStorage(golden.place / golden.name).list(column):
            if name != "zarr.json":
                key = f"{column}/{name}"
                assert structure(tmp_path / golden.name, key, count) == structure(
                    golden.place / golden.name, key, count
                )


def structure(root: Path, key: str, slots: int) -> tuple[object, list[bool]]:
    reader = LocalStorage(root).open(key)
    tail = read_tail(reader, ShardGrid(2, 2, slots // 2, 1))
    reader.close()
    return tail.label, tail.present.tolist()


def test_golden_files_are_small() -> None:
    assert sum(path.stat().st_size for path in V1.rglob("*") if path.is_file()) < 100_000
