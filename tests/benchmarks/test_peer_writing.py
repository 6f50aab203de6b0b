"""Every way to write ends with the same states on the disk, which the peers' own readers give back."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import zarr
from safetensors.torch import load_file

from benchmarks.peer_writing import ways_to_write
from benchmarks.peers import PIPELINES
from benchmarks.reading import LAYERS, LINKS, measure_epochs, measure_writing, schema_of, write_stores
from benchmarks.samples import synthetic_samples
from benchmarks.storage import distinct_files
from dspark_store import open_cache
from dspark_store.format.dtypes import tensor_bits

ZARR = [*PIPELINES, "TensorStore", "dask.array.store"]


@pytest.fixture(scope="module")
def samples():
    return synthetic_samples(24, 8, LAYERS, 18, ragged=True)


@pytest.fixture(scope="module")
def ways(samples):
    return ways_to_write(samples, {codec: schema_of(samples, codec) for codec in ("none", "default")}, 1)


def wanted(samples, sample):
    return torch.cat(list(samples.states(sample)), dim=1)


@pytest.mark.parametrize("name", ZARR)
@pytest.mark.filterwarnings("ignore")
def test_other_zarr_libraries_write_the_same_arrays(name, samples, ways, tmp_path):
    ways[name](tmp_path / "written")
    layers = zarr.open_array(tmp_path / "written" / "target_hidden_states", mode="r")
    last = zarr.open_array(tmp_path / "written" / "target_last_hidden_states", mode="r")
    assert layers.shape == (18, 24, LAYERS * 8)
    for sample, length in enumerate(samples.lengths):
        states = wanted(samples, sample)
        assert np.array_equal(layers[sample, :length], tensor_bits(states).view(np.uint16))
        assert np.array_equal(last[sample, :length], tensor_bits(states[:, -8:].contiguous()).view(np.uint16))
        assert (np.asarray(layers[sample, length:]) == 0xFFFF).all()


def test_ours_is_a_store(samples, ways, tmp_path):
    ways["ours, default"](tmp_path / "written")
    cache = open_cache(tmp_path / "written")
    assert torch.equal(cache.read([5])["target_hidden_states"][0, : samples.lengths[5]], wanted(samples, 5))


def test_safetensors_shards_are_padded(samples, ways, tmp_path):
    ways["safetensors shards (NeMo)"](tmp_path / "written")
    shards = [load_file(path) for path in sorted((tmp_path / "written").iterdir())]
    layers = torch.cat([shard["target_hidden_states"] for shard in shards])
    assert layers.shape == (18, 24, LAYERS * 8)
    for sample, length in enumerate(samples.lengths):
        assert torch.equal(layers[sample, :length], wanted(samples, sample))
        assert not layers[sample, length:].any()


def test_ragged_rows_are_as_large_as_what_they_hold(samples, ways, tmp_path):
    ways["ragged rows in one file (DeepSpec)"](tmp_path / "written")
    assert sum(distinct_files(tmp_path / "written").values()) == sum(samples.lengths) * ((LAYERS + 1) * 16 + 5)


@pytest.mark.filterwarnings("ignore")
def test_every_peer_is_timed_writing(samples, tmp_path):
    table = measure_writing(samples, tmp_path, 1, "writing")
    names = {str(row[0]) for row in table.rows}
    for peer in ("NeMo", "DeepSpec", "default pipeline", "fused", "zarrs", "TensorStore", "dask"):
        assert any(peer in name for name in names), peer
    assert len(table.comparisons) == 2 * (len(names) - 2)


@pytest.mark.filterwarnings("ignore")
def test_epochs_stand_beside_every_reader_and_bound_over_every_link(samples, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.reading.LINKS", tuple(replace(link, epochs=1) for link in LINKS))
    table = measure_epochs(samples, tmp_path, write_stores(samples, tmp_path), 1, "small")
    assert {(row[0], row[1]) for row in table.rows} == {(link.name, of) for link in LINKS for of in ("none", "default")}
    for link in LINKS:
        found = [str(row[2]) for row in table.rows if row[0] == link.name]
        for peer in (
            "NeMo",
            "DeepSpec",
            "default pipeline",
            "fused",
            "TensorStore",
            "ours, flat",
            "requests alone, flat",
        ):
            assert any(peer in name for name in found), (link, peer)
    warm = {(row[1], row[2]) for row in table.rows if row[0] == "warm"}
    assert {("default", "decode alone"), ("none", "copy alone, stacked"), ("none", "ours, stacked")} <= warm
    against = {(one.where, one.ours, one.peer) for one in table.comparisons}
    assert ("small, epochs, cold", "ours, flat, codec default", "TensorStore") in against
    assert ("small, epochs, warm", "ours, stacked, codec none", "safetensors, slice and stack (NeMo)") in against
    assert all(float(row[3] or 0) > 0 for row in table.rows)
