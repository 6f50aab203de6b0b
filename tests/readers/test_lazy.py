"""Lazy views give what the reader gives, block by block, here and on a cluster."""

from multiprocessing import get_context
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
import torch
import xarray
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_store import Cache, CacheLoader, open_cache
from dspark_store.format.schema import COLUMNS, IDS, LAST, LAYERS, MASK
from dspark_store.readers import lazy
from tests.stores import BuiltStore, build_store, flip

LENGTHS = (1, 20, 7, 8, 9, 13, 20, 4)
DTYPES = {"bf16": np.float32, "fp16": np.float16, "fp32": np.float32}


@pytest.fixture(scope="module", params=list(DTYPES))
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BuiltStore:
    """A store of three shards, of three, three and two samples."""
    place = tmp_path_factory.mktemp("stores") / request.param
    fields = {"store_id": f"{list(DTYPES).index(request.param):032x}"}
    return build_store(place, dtype=request.param, lengths=LENGTHS, weights=False, fields=fields)


@pytest.fixture
def cache(store: BuiltStore) -> Cache:
    return open_cache(store.path)


def as_numpy(values: torch.Tensor) -> np.ndarray:
    """A tensor as the lazy views give it: bfloat16 as float32."""
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def computed(array: da.Array) -> np.ndarray:
    """Compute in threads of this process."""
    with dask.config.set(scheduler="threads", num_workers=2):
        values: np.ndarray = array.compute()
    return values


@pytest.mark.parametrize("column", COLUMNS)
def test_a_column_is_what_the_reader_gives(column: str, store: BuiltStore, cache: Cache) -> None:
    expected = as_numpy(cache.read(range(len(cache)), columns=[column])[column])
    array = cache.dask(column)
    assert array.shape == expected.shape
    assert array.dtype == (np.int64 if column in (IDS, MASK) else DTYPES[store.schema.dtype.name])
    values = computed(array)
    assert values.dtype == array.dtype
    assert values.tobytes() == expected.tobytes()


@pytest.mark.parametrize("block_bytes", [1, 1000, 2**27])
def test_blocks_never_span_shards_or_layers(cache: Cache, block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "_BLOCK_BYTES", block_bytes)
    for column in COLUMNS:
        rows, positions, *features = cache.dask(column).chunks
        ends = np.cumsum(rows).tolist()
        assert {3, 6, 8} <= set(ends)
        assert positions == (20,)
        assert features == ([] if column in (IDS, MASK) else [(8, 8, 8) if column == LAYERS else (8,)])
        assert block_bytes > 1 or set(rows) == {1}


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), batch_size=st.integers(1, 5))
def test_random_batches_by_lazy_slicing_equal_the_loaders(seed: int, batch_size: int, cache_of_bf16: Cache) -> None:
    cache = cache_of_bf16
    loader = CacheLoader(cache, batch_size, seed=seed, last="short", min_supervised=0, dp_rank=0, dp_size=1)
    columns = {column: cache.dask(column) for column in COLUMNS}
    for batch in loader:
        rows = batch["sample"].numpy()
        for column, array in columns.items():
            assert np.array_equal(computed(array[rows]), as_numpy(batch[column])), column


@pytest.fixture(scope="module")
def cache_of_bf16(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return open_cache(build_store(tmp_path_factory.mktemp("bf16"), lengths=LENGTHS, weights=False).path)


def test_a_slice_of_one_layer_reads_only_its_blocks(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    read, blocks = Cache.read, []

    def noted(self: Cache, rows: range, **options: Any) -> dict[str, torch.Tensor]:
        blocks.append((rows, options["layers"]))
        return read(self, rows, **options)

    monkeypatch.setattr(Cache, "read", noted)
    computed(cache.dask(LAYERS)[3:5, :, 8:16])
    assert blocks == [(range(3, 6), [-1])]


def test_the_zarr_group_is_the_store_read_only(store: BuiltStore, cache: Cache) -> None:
    group = cache.zarr
    assert set(group.array_keys()) == set(COLUMNS)
    rows = np.array([6, 2, 4])
    ids = np.asarray(group[IDS].oindex[rows])  # type: ignore[union-attr]  # an array
    assert np.array_equal(np.where(ids < 0, cache.pad_token_id, ids), cache.read(rows.tolist())[IDS].numpy())
    with pytest.raises(ValueError, match="read-only"):
        group[IDS][0] = 1  # type: ignore[index]  # an array


def test_xarray_opens_the_store_with_named_dimensions(cache: Cache) -> None:
    with xarray.open_zarr(cache.zarr.store, consolidated=False, chunks=None) as dataset:
        assert dataset[LAST].dims == ("sample", "position", "feature")
        assert np.array_equal(dataset[MASK].isel(sample=[1]).to_numpy(), cache.read([1])[MASK].numpy())


def test_labelled_columns_are_decoded_and_the_line_for_raw_bits_gives_the_same(store: BuiltStore, cache: Cache) -> None:
    dataset = cache.xarray()
    assert dict(dataset.sizes) == {"sample": 8, "position": 20, "layer": 3, "feature": 8}
    assert dataset["length"].to_numpy().tolist() == list(LENGTHS)
    layer = cache.layer_ids[1]
    states = computed(dataset[LAYERS].sel(layer=layer).isel(sample=slice(2, 4)).data)
    assert np.array_equal(states, as_numpy(cache.read([2, 3], layers=[layer])[LAYERS]))
    if store.schema.dtype.name == "bf16":
        raw = np.asarray(cache.zarr[LAST][1])  # type: ignore[index]  # an array
        assert np.array_equal((raw.astype("uint32") << 16).view("float32"), as_numpy(cache[1][LAST]))


def test_an_unknown_column_is_refused(cache: Cache) -> None:
    with pytest.raises(ValueError, match="column 'labels' is unknown; choose from input_ids"):
        cache.dask("labels")


def test_damage_is_an_error_where_a_block_is_computed(tmp_path: Path) -> None:
    build_store(tmp_path, lengths=LENGTHS, weights=False, fields={"store_id": "e" * 32})
    flip(tmp_path / f"{LAST}/c.1.0.0", 40)
    array = open_cache(tmp_path).dask(LAST)
    assert computed(array[:3]).shape == (3, 20, 8)
    with pytest.raises(ValueError, match=r"target_last_hidden_states, sample 3 \(shard 1\)"):
        computed(array[3:4])


def test_another_store_in_its_place_is_noticed(tmp_path: Path) -> None:
    build_store(tmp_path / "a", lengths=(3, 4), weights=False, fields={"store_id": "c" * 32})
    build_store(tmp_path / "b", lengths=(3, 4), weights=False, fields={"store_id": "d" * 32})
    array = open_cache(tmp_path / "a").dask(IDS)
    (tmp_path / "a").rename(tmp_path / "c")
    (tmp_path / "b").rename(tmp_path / "a")
    with pytest.raises(ValueError, match="holds another store now"):
        computed(array)


def test_a_cluster_of_processes_computes_the_same(cache_of_bf16: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("distributed", reason="needs the extra distributed")
    get_context("forkserver").set_forkserver_preload(["distributed", "dspark_store"])  # imports torch once for both
    monkeypatch.setattr("distributed.utils._forkserver_preload_set", True)
    with (
        dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}),
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        distributed.Client(cluster),
    ):
        means = cache_of_bf16.dask(LAST).mean(axis=(1, 2)).compute()
        rows = cache_of_bf16.dask(LAYERS)[[6, 1]].compute()
    assert np.allclose(means, as_numpy(cache_of_bf16.read(range(8))[LAST]).mean(axis=(1, 2)))
    assert np.array_equal(rows, as_numpy(cache_of_bf16.read([6, 1])[LAYERS]))
