"""A column that somebody rewrote with other codecs or chunks reads as before, through zarr-python."""

import gzip
import json
import shutil
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from numcodecs import blosc, lz4, zstd
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec
from zarr.codecs import numcodecs as foreign

from dspark_store import DamagedStoreError, open_cache, verify_store
from dspark_store.format.schema import COLUMNS, IDS, LAST, LAYERS, MASK
from tests.stores import BuiltStore, build_store, flip, padded, reseal, same_bits

CHAINS: dict[str, dict[str, Any]] = {
    "zstd": {"compressors": [ZstdCodec(level=3)]},
    "gzip": {"compressors": [GzipCodec()]},
    "plain": {"compressors": None},
    "blosc": {"compressors": [BloscCodec(cname="lz4", shuffle="bitshuffle")]},
    "zlib": {"compressors": [foreign.Zlib(level=1)]},
    "lz4": {"compressors": [foreign.LZ4()]},
}


def rewrite(store: BuiltStore, column: str, chunks: tuple[int, ...], **options: Any) -> Path:
    """Write a column anew with zarr-python, and seal the store again; return the column's directory."""
    directory = store.path / column
    before = zarr.open_array(directory, mode="r")
    values = np.asarray(before[...])
    shutil.rmtree(directory)
    array = zarr.create_array(
        store=directory,
        shape=values.shape,
        dtype=values.dtype,
        chunks=chunks,
        fill_value=before.fill_value,
        attributes=dict(before.attrs),
        dimension_names=before.metadata.dimension_names,  # type: ignore[union-attr]  # version 3 has them
        **options,
    )
    array[...] = values
    reseal(store.storage)
    return directory


def assert_reads_as_before(store: BuiltStore) -> None:
    cache, expected = open_cache(store.path), padded(store)
    batch = cache.read(range(len(cache)), layout="stacked")
    assert (batch[IDS].tolist(), batch[MASK].tolist()) == (expected.ids.tolist(), expected.mask.tolist())
    assert same_bits(batch[LAYERS], expected.layers)
    assert same_bits(batch[LAST], expected.last)
    part = cache.read([-1, 1], layers=[5, 2], positions=slice(3, 11), layout="stacked")
    assert same_bits(part[LAYERS], expected.layers[[-1, 1]][:, [2, 0], 3:11])


@pytest.mark.parametrize(("chain", "dtype"), [*((chain, "bf16") for chain in CHAINS), ("zstd", "fp32")])
def test_states_with_another_codec_read_as_before(chain: str, dtype: str, tmp_path: Path) -> None:
    store = build_store(tmp_path, dtype=dtype)
    rewrite(store, LAYERS, (1, 8, 8), shards=(3, 24, 24), **CHAINS[chain])
    assert open_cache(tmp_path).foreign_columns == {LAYERS}
    assert_reads_as_before(store)


@pytest.mark.parametrize("chunks", [(1, 20, 24), (7, 5, 3), (2, 20, 12)])
def test_states_with_other_chunks_read_as_before(chunks: tuple[int, int, int], tmp_path: Path) -> None:
    store = build_store(tmp_path, dtype="fp16")
    rewrite(store, LAYERS, chunks)
    assert_reads_as_before(store)


@pytest.mark.parametrize(("column", "chunks"), [(IDS, (2, 5)), (MASK, (7, 20)), (LAST, (1, 20, 8))])
def test_any_column_may_be_rewritten(column: str, chunks: tuple[int, ...], tmp_path: Path) -> None:
    store = build_store(tmp_path)
    rewrite(store, column, chunks)
    assert_reads_as_before(store)


def test_all_columns_may_be_rewritten(tmp_path: Path) -> None:
    store = build_store(tmp_path)
    for column in COLUMNS:
        rewrite(store, column, (2, 20) if column in (IDS, MASK) else (2, 20, 8))
    assert open_cache(tmp_path).foreign_columns == set(COLUMNS)
    assert_reads_as_before(store)


def test_a_rewritten_store_without_damage_has_no_problems(tmp_path: Path) -> None:
    rewrite(build_store(tmp_path), LAYERS, (1, 8, 8))
    assert verify_store(open_cache(tmp_path)) == []


def test_rewritten_metadata_must_be_sealed(tmp_path: Path) -> None:
    store = build_store(tmp_path)
    before = store.storage.read("zarr.json")
    rewrite(store, LAYERS, (1, 8, 8))
    store.storage.put("zarr.json", before)
    with pytest.raises(DamagedStoreError, match="seal"):
        open_cache(tmp_path)


def test_a_chunk_that_does_not_decode_names_column_sample_and_shard(tmp_path: Path) -> None:
    store = build_store(tmp_path)
    directory = rewrite(store, LAST, (1, 20, 8), compressors=[GzipCodec()])
    flip(directory / "c" / "4" / "0" / "0", 1)
    with pytest.raises(DamagedStoreError, match=r"target_last_hidden_states, sample 4 \(shard 1\): zarr-python cannot"):
        open_cache(tmp_path)[4]


def test_a_missing_object_is_no_fill_value(tmp_path: Path) -> None:
    store = build_store(tmp_path)
    directory = rewrite(store, LAST, (1, 20, 8))
    (directory / "c" / "4" / "0" / "0").unlink()
    with pytest.raises(DamagedStoreError, match=r"target_last_hidden_states, sample 4 \(shard 1\)"):
        open_cache(tmp_path)[4]


@pytest.mark.parametrize("chain", ["gzip", "zstd"])
def test_a_foreign_chunk_that_cannot_be_read_is_no_damage(chain: str, tmp_path: Path, monkeypatch) -> None:
    store = build_store(tmp_path, weights=False)
    rewrite(store, LAST, (1, 8, 8), **CHAINS[chain])
    cache = open_cache(tmp_path)

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(zarr.Array, "__getitem__", refused)
    where = rf"{LAST}, sample 4 \(shard 1\): cannot read {LAST} of .*: Permission denied"
    with pytest.raises(PermissionError, match=where):
        cache[4]


BOMB_BYTES = 64 * 1024 * 1024
ZEROS = bytes(BOMB_BYTES)
BOMBS: dict[str, tuple[dict[str, Any], bytes]] = {
    "zlib": (CHAINS["zlib"], zlib.compress(ZEROS, 9)),
    "gzip": (CHAINS["gzip"], gzip.compress(ZEROS, 9)),
    "gzip of many members": (CHAINS["gzip"], gzip.compress(bytes(1024)) * 1000),
    "zstd": (CHAINS["zstd"], zstd.compress(ZEROS, 1)),
    "zstd without a size": (CHAINS["zstd"], bytes.fromhex("28b52ffd0058010000")),
    "lz4": (CHAINS["lz4"], lz4.compress(ZEROS)),
    "lz4 that claims": (CHAINS["lz4"], (2**31 - 1).to_bytes(4, "little") + bytes(8)),
    "blosc": (CHAINS["blosc"], blosc.compress(ZEROS, b"lz4", 5)),
    "nothing": (CHAINS["zlib"], b""),
}


def blosc_with(place: int, value: int) -> bytes:
    """Return a blosc chunk of the right size with one number of its header changed."""
    chunk = bytearray(blosc.compress(bytes(20 * 8 * 2), b"lz4", 5))
    chunk[place : place + 4] = (value % 2**32).to_bytes(4, "little")
    return bytes(chunk)


BOMBS |= {
    "blosc with blocks of -1": (CHAINS["blosc"], blosc_with(8, -1)),
    "blosc of no end": (CHAINS["blosc"], blosc_with(4, -1)),
    "blosc of another length": (CHAINS["blosc"], blosc_with(12, 2**31)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_chunk_that_becomes_more_than_a_chunk_is_damage_in_bounded_memory(name: str, tmp_path: Path) -> None:
    chain, stored = BOMBS[name]
    store = build_store(tmp_path)
    directory = rewrite(store, LAST, (1, 20, 8), **chain)
    (directory / "c" / "4" / "0" / "0").write_bytes(stored)
    cache = open_cache(tmp_path)
    cache[3]
    tracemalloc.start()
    try:
        with pytest.raises(DamagedStoreError, match=r"target_last_hidden_states, sample 4 \(shard 1\)"):
            cache[4]
        assert tracemalloc.get_traced_memory()[1] < BOMB_BYTES // 4
    finally:
        tracemalloc.stop()
    assert {sample for problem in verify_store(cache) for sample in problem.samples} == {4}


def grid(*chunk: Any) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}


def sharding(*chunk: Any, index: str = "crc32c") -> list[dict[str, Any]]:
    inner = {
        "chunk_shape": list(chunk),
        "codecs": [{"name": "bytes"}],
        "index_codecs": [{"name": "bytes"}, {"name": index}],
    }
    return [{"name": "sharding_indexed", "configuration": inner}]


@pytest.mark.parametrize(
    "fields",
    [
        {"shape": [7, 20, 9]},
        {"shape": [2**40, 20, 8]},
        {"data_type": "float64"},
        {"node_type": "group"},
        {"chunk_grid": grid(1, 20)},
        {"chunk_grid": grid(1, 20, 0)},
        {"chunk_grid": grid(1, 20, "8")},
        {"chunk_grid": grid(2**40, 2**40, 2**40)},
        {"chunk_grid": grid(7, 2**20, 8)},
        {"chunk_grid": {"name": "rectilinear", "configuration": {}}},
        {"codecs": []},
        {"codecs": [5]},
        {"codecs": "bytes"},
        {"codecs": [{"name": "bytes"}, {"name": "numcodecs.lzma"}]},
        {"codecs": [{"name": "bytes", "configuration": {"endian": "middle"}}]},
        {"codecs": [{"name": "transpose", "configuration": {"order": [5, 5, 5]}}, {"name": "bytes"}]},
        {"codecs": sharding(1, 1, 1), "chunk_grid": grid(2**20, 20, 8)},
        {"codecs": sharding(1, 20)},
        {"codecs": sharding(1, 20, 8, index="gzip")},
        {"chunk_key_encoding": {"name": "../../x"}},
        {"storage_transformers": [{"name": "any"}]},
    ],
)
def test_metadata_that_does_not_fit_the_layout_is_damage(fields: dict[str, Any], tmp_path: Path) -> None:
    store = build_store(tmp_path)
    rewrite(store, LAST, (1, 20, 8))
    node = tmp_path / LAST / "zarr.json"
    node.write_text(json.dumps({**json.loads(node.read_text()), **fields}))
    reseal(store.storage)
    cache = open_cache(tmp_path)
    with pytest.raises(DamagedStoreError, match=r"target_last_hidden_states, sample 4 \(shard 1\)"):
        cache[4]
    assert verify_store(cache)
