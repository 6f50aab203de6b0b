"""A column that somebody rewrote with other codecs or chunks reads as before, through zarr-python."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

from dspark_store import DamagedStoreError, open_cache, verify_store
from dspark_store.format.schema import COLUMNS, IDS, LAST, LAYERS, MASK
from tests.stores import BuiltStore, build_store, flip, padded, reseal, same_bits

CHAINS: dict[str, dict[str, Any]] = {
    "zstd": {"compressors": [ZstdCodec(level=3)]},
    "gzip": {"compressors": [GzipCodec()]},
    "plain": {"compressors": None},
    "blosc": {"compressors": [BloscCodec(cname="lz4", shuffle="bitshuffle")]},
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

    monkeypatch.setattr(zarr, "open_array", refused)
    where = rf"{LAST}, sample 4 \(shard 1\): cannot read {LAST} of .*: Permission denied"
    with pytest.raises(PermissionError, match=where):
        cache[4]
