"""Stores of int8 codes: read as states of any dtype, or as codes, by cache and loader."""

from typing import Any

import pytest
import torch
import zarr

from dspark_store import CacheLoader, DamagedStoreError, open_cache, split_codes, verify_store
from dspark_store.format.codecs import CodecChain
from dspark_store.format.schema import LAST, LAYERS, metadata_bytes
from dspark_store.readers.tensors import decoded
from tests.stores import RAGGED, Shape, build_store, flip, make_sample, padded, reseal, same_bits

SHAPE = Shape(hidden_size=12)
WIDTH = 12 + 8 + 1


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    def with_outliers(*given):
        sample = make_sample(*given)
        for slot, layer in enumerate(sample.layers):
            layer[4:5, slot::5] *= 100  # in other channels of each layer
        return sample

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.stores.make_sample", with_outliers)
        store = build_store(tmp_path_factory.mktemp("codes") / "store", dtype="int8", shape=SHAPE, weights=False)
    assert len({scale.high_channels for scale in store.schema.scales}) > 1
    return store


@pytest.fixture(scope="module")
def cache(built):
    return open_cache(built.path)


@pytest.mark.parametrize("layout", ["flat", "stacked"])
def test_codes_are_read_as_they_are_stored_and_can_be_decoded_later(built, cache, layout):
    codes = cache.read(range(7), layout=layout, dequantise=False)
    assert codes[LAYERS].dtype == codes[LAST].dtype == torch.int8
    assert codes[LAYERS].shape == ((7, 20, 3 * WIDTH) if layout == "flat" else (7, 3, 20, WIDTH))
    counts, high, exponents = split_codes(codes[LAST], 12)
    assert high.any()
    assert (counts.shape, high.shape, exponents.shape) == ((7, 20, 12), (7, 20, 8), (7, 20))
    states = cache.read(range(7), layout=layout)
    assert same_bits(cache.dequantise(codes)[LAYERS], states[LAYERS])
    numbers = counts.float()
    numbers[..., cache.schema.scale(LAST, 0).high_channels] += 255.0 * high
    assert torch.equal(torch.ldexp(numbers, exponents[..., None]), states[LAST].float())
    assert split_codes(codes[LAYERS], 12)[0].shape == ((7, 20, 3, 12) if layout == "flat" else (7, 3, 20, 12))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("stored", ["int8", "bf16"])
def test_states_come_in_the_dtype_that_is_asked_for(tmp_path, stored, dtype):
    store = build_store(tmp_path, dtype=stored, weights=False)
    batch = open_cache(tmp_path).read(range(7), dtype=dtype, layout="stacked")
    expected = padded(store)
    assert same_bits(batch[LAYERS], expected.layers.to(dtype))
    assert same_bits(batch[LAST], expected.last.to(dtype))


def test_chosen_layers_and_positions_are_decoded_by_their_own_channels(built, cache):
    batch = cache.read([6, 3, 1], layers=[-1, 2], positions=slice(3, 15), layout="stacked")
    assert same_bits(batch[LAYERS], padded(built).layers[[6, 3, 1]][:, [1, 0], 3:15])
    codes = cache.read([6, 3, 1], layers=[-1, 2], positions=slice(3, 15), dequantise=False, layout="stacked")
    assert same_bits(cache.dequantise(codes, layers=[-1, 2])[LAYERS], batch[LAYERS])


def test_a_dtype_of_no_states_is_refused(cache):
    for options in ({"dtype": torch.int32}, {"dtype": torch.float32, "dequantise": False}):
        with pytest.raises(ValueError, match="is none of states"):
            cache.read([0], **options)
        with pytest.raises(ValueError, match="is none of states"):
            CacheLoader(cache, 2, **options)


@pytest.mark.parametrize(
    "options", [{"shape": "full"}, {"shape": "longest"}, {"shape": "packed", "budget": 24}], ids=str
)
@pytest.mark.parametrize("layout", ["flat", "stacked"])
def test_a_loader_gives_codes_that_decode_to_its_states(cache, options, layout):
    given = {"last": "short", "layers": [5, 2], "layout": layout, **options}
    with_states, with_codes = (list(CacheLoader(cache, 2, dequantise=each, **given)) for each in (True, False))
    assert with_states
    for states, codes in zip(with_states, with_codes, strict=True):
        assert codes[LAYERS].dtype == torch.int8
        found = decoded(cache.schema, [2, 0], None, codes)
        assert all(torch.equal(found[name], values) for name, values in states.items())


def test_a_loader_of_another_dtype_converts(built, cache):
    (batch,) = CacheLoader(cache, 7, shuffle=False, dtype=torch.float32, layout="stacked", min_supervised=0)
    assert same_bits(batch[LAYERS], padded(built).layers.float())


def test_a_store_of_codes_has_no_problems_and_a_flipped_bit_is_one(tmp_path):
    store = build_store(tmp_path, dtype="int8", spoiled=4)
    assert verify_store(open_cache(tmp_path)) == []
    assert open_cache(tmp_path).status.tolist() == [0, 0, 0, 0, 1, 0, 0]
    flip(store.path / LAYERS / "c.1.0.1", 40)
    with pytest.raises(DamagedStoreError, match=r"layer -1, sample 3 \(shard 1\)"):
        open_cache(tmp_path).read([3])


def test_codes_that_somebody_encoded_anew_are_read(tmp_path):
    store = build_store(tmp_path / "store", dtype="int8", shape=SHAPE, weights=False)
    path = store.path / LAYERS
    values: Any = zarr.open_array(path, mode="r")[...]
    document: dict[str, Any] = dict(store.schema.columns()[LAYERS].document())
    document["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": [3, 8, 2 * WIDTH]}}
    document["codecs"] = [{"name": "bytes"}, {"name": "gzip", "configuration": {"level": 1}}]
    for old in path.glob("c.*"):
        old.unlink()
    (path / "zarr.json").write_bytes(metadata_bytes(document))
    zarr.open_array(path, mode="r+")[...] = values
    reseal(store.storage)
    cache = open_cache(store.path)
    assert cache.foreign_columns == {LAYERS}
    assert same_bits(cache.read(range(7), layout="stacked")[LAYERS], padded(store).layers)
    assert verify_store(cache) == []
    assert len(RAGGED) == len(cache)


def test_the_codecs_of_codes_have_one_byte_values(built):
    chain = built.schema.chain(LAYERS)
    assert isinstance(chain, CodecChain)
    assert built.schema.columns()[LAYERS].data_type == "int8"
