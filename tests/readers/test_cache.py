"""A store's samples come back as they were written, in any selection."""

import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_store import Cache, open_cache
from dspark_store.format.schema import IDS, LAST, LAYERS, MASK
from tests.stores import PAD, RAGGED, BuiltStore, build_store, padded, same_bits

LAYER_IDS = (2, -1, 5)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuiltStore:
    return build_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def cache(built: BuiltStore) -> Cache:
    return open_cache(built.path)


def flat(layers: torch.Tensor) -> torch.Tensor:
    """Turn (B, K, S, H) into (B, S, K*H)."""
    return layers.transpose(1, 2).flatten(2)


def test_a_cache_knows_what_it_holds(cache: Cache) -> None:
    assert len(cache) == 7
    assert (cache.layer_ids, cache.dtype, cache.pad_token_id) == (LAYER_IDS, torch.bfloat16, PAD)
    assert cache.lengths.tolist() == list(RAGGED)
    assert cache.status.tolist() == [0] * 7
    assert cache.manifest["num_samples"] == 7
    assert repr(cache).endswith("samples=7, layers=[2, -1, 5])")


def test_slices_and_lists_are_batches_and_a_cache_is_a_context(built: BuiltStore) -> None:
    with open_cache(built.path) as cache:
        for index, rows in ((slice(0, 3), [0, 1, 2]), ([1, -1], [1, 6]), (np.array([2, 1]), [2, 1])):
            assert all(torch.equal(values, cache.read(rows)[name]) for name, values in cache[index].items())
        assert cache[np.int64(3)][IDS].tolist() == cache[torch.tensor(3)][IDS].tolist() == cache[3][IDS].tolist()
        assert "<td>2, -1, 5" in cache._repr_html_()
        assert len(repr(cache.weights())) < 100


def test_counts_of_tokens_are_those_of_the_columns_and_make_a_draft_vocabulary(built: BuiltStore, cache: Cache) -> None:
    batch = cache.read(range(len(cache)), columns=(IDS, MASK))
    spoken, count = batch[IDS][batch[MASK] > 0], int(cache.lengths.sum())
    counts = cache.token_counts(supervised=True)
    assert counts.tolist() == np.bincount(spoken.numpy(), minlength=len(counts)).tolist()
    assert cache.token_counts().sum() == count
    d2t, t2d, coverage = cache.draft_vocabulary(3)
    ids = torch.arange(3) + d2t
    assert torch.equal(t2d.nonzero().flatten(), ids)
    assert coverage == pytest.approx(float(np.sort(counts)[-3:].sum()) / len(spoken))
    with pytest.raises(ValueError, match=f"between 1 and the target's {len(counts)}, got 0"):
        cache.draft_vocabulary(0)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "int8"])
@pytest.mark.parametrize("codec", ["none", "fast", "default", "dense"])
def test_every_sample_comes_back_bit_by_bit(dtype: str, codec: str, tmp_path: Path) -> None:
    built = build_store(tmp_path, dtype=dtype, codec=codec, lengths=(20, 1, 9, 16), weights=False)
    batch, expected = open_cache(tmp_path).read(range(4)), padded(built)
    assert torch.equal(batch[IDS], expected.ids)
    assert torch.equal(batch[MASK], expected.mask)
    assert same_bits(batch[LAYERS], flat(expected.layers))
    assert same_bits(batch[LAST], expected.last)


def test_a_sample_has_upstreams_keys_dtypes_and_shapes(cache: Cache) -> None:
    assert {name: (tuple(value.shape), value.dtype) for name, value in cache[3].items()} == {
        "input_ids": ((20,), torch.int64),
        "loss_mask": ((20,), torch.int64),
        "target_hidden_states": ((20, 24), torch.bfloat16),
        "target_last_hidden_states": ((20, 8), torch.bfloat16),
    }


def test_past_a_samples_end_stand_the_pad_id_zero_and_zeros(cache: Cache) -> None:
    sample = cache[2]
    assert sample[IDS][7:].tolist() == [PAD] * 13
    assert not sample[MASK][7:].any()
    assert not sample[LAYERS][7:].any()
    assert not sample[LAST][7:].any()


def test_a_negative_index_counts_from_the_end(cache: Cache) -> None:
    assert all(torch.equal(cache[-1][name], cache[6][name]) for name in cache[0])
    for index in (-7, np.int8(-7)):
        assert torch.equal(cache.read([index])[IDS], cache.read([0])[IDS])


@pytest.mark.parametrize("index", [7, -8, 100])
def test_an_index_past_either_end_is_an_index_error(cache: Cache, index: int) -> None:
    with pytest.raises(IndexError, match=f"sample {index} is outside the store's 7 samples"):
        cache[index]


def test_iteration_ends(cache: Cache) -> None:
    assert len(list(cache)) == 7  # type: ignore[call-overload]  # by way of __getitem__


@settings(max_examples=50)
@given(
    rows=st.lists(st.integers(-7, 6), max_size=5),
    layers=st.none() | st.lists(st.sampled_from(LAYER_IDS), max_size=4),
    start=st.none() | st.integers(-25, 25),
    stop=st.none() | st.integers(-25, 25),
)
def test_any_selection_is_the_whole_store_selected(
    cache: Cache, built: BuiltStore, rows: list[int], layers: list[int] | None, start: int | None, stop: int | None
) -> None:
    span, slots = slice(start, stop), [LAYER_IDS.index(layer) for layer in (LAYER_IDS if layers is None else layers)]
    everything = padded(built)
    batch = cache.read(rows, layers=layers, positions=span, layout="stacked")
    assert torch.equal(batch[IDS], everything.ids[rows][:, span])
    assert torch.equal(batch[MASK], everything.mask[rows][:, span])
    assert same_bits(batch[LAYERS], everything.layers[rows][:, slots][:, :, span])
    assert same_bits(batch[LAST], everything.last[rows][:, span])


@settings(max_examples=30)
@given(rows=st.lists(st.integers(0, 6), max_size=3), layers=st.lists(st.sampled_from(LAYER_IDS), max_size=3))
def test_the_flat_layout_is_the_stacked_one_side_by_side(cache: Cache, rows: list[int], layers: list[int]) -> None:
    stacked = cache.read(rows, columns=[LAYERS], layers=layers, layout="stacked")[LAYERS]
    assert same_bits(cache.read(rows, columns=[LAYERS], layers=layers)[LAYERS], flat(stacked))


def test_only_asked_columns_are_read(cache: Cache) -> None:
    assert list(cache.read([0], columns=[LAST, IDS])) == [LAST, IDS]


def test_layers_come_in_the_order_asked(cache: Cache) -> None:
    both = cache.read([1], columns=[LAYERS], layers=[5, 2])[LAYERS]
    one = [cache.read([1], columns=[LAYERS], layers=[layer])[LAYERS] for layer in (5, 2)]
    assert same_bits(both, torch.cat(one, dim=2))


@pytest.mark.parametrize("layout", ["flat", "stacked"])
def test_given_tensors_are_filled_and_returned(cache: Cache, layout: str) -> None:
    fresh = cache.read([1, 4], layout=layout)  # type: ignore[arg-type]  # one of the two
    out = {name: torch.full_like(values, 77) for name, values in fresh.items()}
    batch = cache.read([1, 4], layout=layout, out=out)  # type: ignore[arg-type]  # one of the two
    assert all(batch[name] is out[name] and torch.equal(out[name], fresh[name]) for name in fresh)


def test_a_given_tensor_may_be_part_of_a_larger_one(cache: Cache) -> None:
    large = torch.full((2, 20, 10), 77, dtype=torch.bfloat16)
    cache.read([1, 4], columns=[LAST], out={LAST: large[..., 1:9]})
    assert same_bits(large[..., 1:9], cache.read([1, 4])[LAST])
    assert (large[..., 0] == 77).all()
    assert (large[..., 9] == 77).all()


@pytest.mark.parametrize(
    "out", [torch.empty((1, 20), dtype=torch.int32), torch.empty((2, 20), dtype=torch.int64)], ids=["dtype", "shape"]
)
def test_a_given_tensor_that_does_not_fit_is_refused(cache: Cache, out: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"out\['input_ids'\] must be \(1, 20\) torch.int64 on the CPU, got"):
        cache.read([0], out={IDS: out})


@pytest.mark.parametrize("strides", [(0, 8, 1), (80, 8, 1), (160, 4, 1)], ids=["expanded", "sliding", "interleaved"])
def test_a_given_tensor_whose_elements_share_memory_is_refused(cache: Cache, strides: tuple[int, ...]) -> None:
    out = torch.zeros(400, dtype=torch.bfloat16).as_strided((2, 20, 8), strides)
    with pytest.raises(
        ValueError, match=r"out\['target_last_hidden_states'\] keeps several elements in the same memory"
    ):
        cache.read([0, 1], columns=[LAST], out={LAST: out})


def test_a_given_tensor_may_lie_the_other_way_round(cache: Cache) -> None:
    out = torch.zeros((8, 20, 2), dtype=torch.bfloat16).permute(2, 1, 0)
    cache.read([1, 4], columns=[LAST], out={LAST: out})
    assert same_bits(out, cache.read([1, 4])[LAST])


def test_a_pickled_cache_is_the_same_cache(cache: Cache) -> None:
    copy = pickle.loads(pickle.dumps(cache))
    assert all(torch.equal(copy[4][name], values) for name, values in cache[4].items())
    assert copy.verify == cache.verify


def test_threads_share_a_cache(built: BuiltStore) -> None:
    cache, expected = open_cache(built.path), padded(built)
    equal: list[bool] = []

    def read(first: int) -> None:
        rows = [*range(first, 7), *range(first)]
        equal.extend(same_bits(cache.read([row])[LAST], expected.last[[row]]) for row in rows)

    threads = [threading.Thread(target=read, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True] * 28


def test_a_sample_without_tokens_is_all_padding(tmp_path: Path) -> None:
    build_store(tmp_path, lengths=(0, 3), weights=False)
    sample = open_cache(tmp_path)[0]
    assert sample[IDS].tolist() == [PAD] * 20
    assert not sample[LAYERS].any()


def test_without_a_recorded_pad_id_zero_stands_past_the_end(tmp_path: Path) -> None:
    build_store(tmp_path, lengths=(3,), weights=False, fields={"manifest": {}})
    assert open_cache(tmp_path)[0][IDS][3:].tolist() == [0] * 17


def test_a_sample_that_is_not_finite_is_marked_and_read_as_it_is(tmp_path: Path) -> None:
    build_store(tmp_path, lengths=(3, 4, 5, 6), weights=False, spoiled=2)
    cache = open_cache(tmp_path)
    assert cache.status.tolist() == [0, 0, 1, 0]
    assert cache[2][LAYERS].isinf().sum() == 1


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([0], {"layers": [2, 3]}, r"layer 3 was not captured; the store has \[2, -1, 5\]"),
        ([0], {"columns": ["labels"]}, "column 'labels' is unknown; choose from input_ids, loss_mask"),
        ([0], {"out": {"labels": torch.zeros(1)}}, "column 'labels' is unknown; choose from input_ids, loss_mask"),
        ([0], {"positions": slice(0, 8, 2)}, "positions must be a slice of step 1"),
        ([0], {"positions": (0, 5)}, "positions must be a slice"),
        ([True, False], {}, "rows are sample numbers"),
        ([1.5], {}, "rows are sample numbers"),
        (["1"], {}, "rows are sample numbers"),
        (np.array([True, False]), {}, "rows are sample numbers"),
    ],
)
def test_what_no_store_has_is_refused(cache: Cache, rows: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cache.read(rows, **options)
