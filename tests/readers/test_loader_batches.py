"""Batches are the samples, bit by bit, in every shape and layout; samples that are no use are left out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import ZstdCodec

from dspark_store import Cache, CacheLoader, open_cache
from dspark_store.format.schema import COLUMNS, IDS, LAST, LAYERS, MASK
from tests.readers.test_foreign import rewrite
from tests.stores import PAD, BuiltStore, Padded, Shape, build_store, padded, same_bits

LAYER_IDS = (2, -1, 5)
LENGTHS = (20, 7, 13, 8, 3, 9, 16, 20, 17, 11, 5)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuiltStore:
    return build_store(tmp_path_factory.mktemp("store"), lengths=LENGTHS, weights=False)


@pytest.fixture(scope="module")
def cache(built: BuiltStore) -> Cache:
    return open_cache(built.path)


@pytest.fixture(scope="module")
def expected(built: BuiltStore) -> Padded:
    return padded(built)


def loader_of(cache: Cache, batch_size: int, **options: Any) -> CacheLoader:
    """A loader of all samples unless told otherwise."""
    return CacheLoader(
        cache, batch_size, **{"min_supervised": 0, "last": "short", "dp_rank": 0, "dp_size": 1, **options}
    )


def flat(layers: torch.Tensor) -> torch.Tensor:
    """Turn (B, K, S, H) into (B, S, K*H)."""
    return layers.transpose(1, 2).flatten(2)


@settings(max_examples=60)
@given(
    columns=st.lists(st.sampled_from(COLUMNS), min_size=1, unique=True),
    layers=st.none() | st.lists(st.sampled_from(LAYER_IDS), min_size=1, max_size=3, unique=True),
    bounds=st.none() | st.tuples(st.integers(-4, 20), st.integers(-4, 20)),
    shape=st.sampled_from(["full", "longest"]),
    layout=st.sampled_from(["flat", "stacked"]),
    batch_size=st.integers(1, 5),
)
def test_batches_are_the_samples_bit_by_bit(
    cache, expected, columns, layers, bounds, shape, layout, batch_size
) -> None:
    slots = [LAYER_IDS.index(layer) for layer in layers or LAYER_IDS]
    start, stop, _ = slice(*(bounds or (None,))).indices(20)
    loader = loader_of(
        cache,
        batch_size,
        columns=columns,
        layers=layers,
        positions=None if bounds is None else slice(*bounds),
        shape=shape,
        layout=layout,
        last="short",
    )
    for batch in loader:
        rows = batch["sample"]
        assert batch["length"].tolist() == [LENGTHS[row] for row in rows]
        end = max(start, stop if shape == "full" else min(stop, int(batch["length"].max())))
        states = expected.layers[rows][:, slots, start:end]
        wanted = {
            IDS: expected.ids[rows, start:end],
            MASK: expected.mask[rows, start:end],
            LAYERS: states if layout == "stacked" else flat(states),
            LAST: expected.last[rows, start:end],
        }
        assert set(batch) == {*columns, "sample", "length"}
        for column in columns:
            same = torch.equal if column in (IDS, MASK) else same_bits
            assert same(batch[column], wanted[column]), column


@settings(max_examples=30)
@given(
    budget=st.integers(1, 50),
    batch_size=st.integers(1, 3),
    policy=st.sampled_from(["cut", "leave_out"]),
    layout=st.sampled_from(["flat", "stacked"]),
    layers=st.sampled_from([None, [5], [5, 2]]),
)
def test_packed_rows_hold_their_samples_bit_by_bit(cache, expected, budget, batch_size, policy, layout, layers) -> None:
    slots = [LAYER_IDS.index(layer) for layer in layers or LAYER_IDS]
    if policy == "leave_out" and budget < min(LENGTHS):
        return
    loader = loader_of(
        cache,
        batch_size,
        shape="packed",
        budget=budget,
        long_samples=policy,
        layers=layers,
        layout=layout,
        columns=COLUMNS,
        last="short",
    )
    samples = iter(loader.epoch_samples().tolist())
    given_out = []
    for batch in loader:
        states = batch[LAYERS] if layout == "stacked" else unflat(batch[LAYERS], len(slots))
        for row, documents in enumerate(batch["seq_lens"].tolist()):
            place = 0
            for width in filter(None, documents):
                sample, length = next(samples), int(batch["doc_remaining"][row, place]) + 1
                given_out.append(sample)
                assert length == min(LENGTHS[sample], budget)
                here, pad = slice(place, place + length), slice(place + length, place + width)
                assert torch.equal(batch[IDS][row, here], expected.ids[sample, :length])
                assert torch.equal(batch[MASK][row, here], expected.mask[sample, :length])
                assert same_bits(states[row, :, here], expected.layers[sample][slots, :length])
                assert same_bits(batch[LAST][row, here], expected.last[sample, :length])
                assert (batch[IDS][row, pad] == PAD).all()
                assert not any(
                    values.any() for values in (batch[MASK][row, pad], states[row, :, pad], batch[LAST][row, pad])
                )
                place += width
            assert place == budget
    assert sorted(given_out) == [row for row, length in enumerate(LENGTHS) if policy == "cut" or length <= budget]


def unflat(states: torch.Tensor, layers: int) -> torch.Tensor:
    """Turn (B, S, K*H) into (B, K, S, H)."""
    return states.view(*states.shape[:2], layers, -1).transpose(1, 2)


def samples_of(loader: CacheLoader) -> list[int]:
    """The samples of an epoch, ascending."""
    return sorted(sample for batch in loader for sample in batch["sample"].tolist())


@pytest.mark.parametrize(("shape", "budget"), [("full", None), ("longest", None), ("packed", 40)])
def test_batches_that_are_kept_are_never_overwritten(cache, shape, budget) -> None:
    options = {"shape": shape, "budget": budget, "prefetch_bytes": 1}
    kept = list(loader_of(cache, 1, **options))
    again = loader_of(cache, 1, **options, device="cpu")
    for one, other in zip(kept, again, strict=True):  # which are not kept, and so are what they should be
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_view_that_is_kept_is_never_overwritten(cache, expected) -> None:
    loader = loader_of(cache, 2, layout="stacked", prefetch_bytes=1)
    kept = [(int(batch["sample"][-1]), batch[LAYERS][-1, 1]) for batch in loader]
    assert all(same_bits(view, expected.layers[sample, 1]) for sample, view in kept)


def test_memory_of_a_batch_that_is_dropped_is_used_again(cache) -> None:
    loader = loader_of(cache, 1, prefetch_bytes=1)
    places = [batch[IDS].data_ptr() for batch in loader]
    assert len(set(places)) < len(places) / 2


def test_a_column_rewritten_by_others_loads_as_before(tmp_path: Path) -> None:
    store = build_store(tmp_path, lengths=LENGTHS, weights=False)
    before = list(loader_of(open_cache(tmp_path), 4))
    rewrite(store, LAYERS, (1, 8, 8), shards=(3, 24, 24), compressors=[ZstdCodec()])
    cache = open_cache(tmp_path)
    assert cache.foreign_columns == {LAYERS}
    for batch, earlier in zip(loader_of(cache, 4), before, strict=True):
        assert all(torch.equal(batch[name], earlier[name]) for name in earlier)


def test_samples_that_are_not_finite_are_never_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dspark_store")
    build_store(tmp_path, lengths=LENGTHS, weights=False, spoiled=4)
    for epoch in (loader := loader_of(open_cache(tmp_path), 3), loader):
        for batch in epoch:
            assert all(batch[column].isfinite().all() for column in (LAYERS, LAST))
            assert 4 not in batch["sample"]
    assert "10 of 11 samples; left out: 1 with non-finite states, 0 with fewer than 0 supervised tokens" in caplog.text


def test_samples_with_too_few_supervised_tokens_are_left_out(cache, caplog) -> None:
    caplog.set_level("INFO", "dspark_store")
    least = 6
    wanted = np.flatnonzero(cache.supervised >= least).tolist()
    assert 0 < len(wanted) < len(LENGTHS)
    assert samples_of(loader_of(cache, 2, min_supervised=least)) == wanted
    assert f"{len(LENGTHS) - len(wanted)} with fewer than 6 supervised tokens" in caplog.text


def test_a_sample_without_a_supervised_token_is_left_out_by_default(tmp_path: Path) -> None:
    build_store(tmp_path, lengths=(1, 4, 5), weights=False)
    cache = open_cache(tmp_path)
    assert cache.supervised.tolist()[0] == 0
    assert CacheLoader(cache, 1, dp_rank=0, dp_size=1).samples.tolist() == [1, 2]


def test_when_no_sample_is_left_the_numbers_say_why(tmp_path: Path) -> None:
    build_store(tmp_path, lengths=(3, 4), weights=False, spoiled=0)
    with pytest.raises(ValueError, match="of 2 samples, 1 are not good and 1 have fewer than 9 supervised tokens"):
        loader_of(open_cache(tmp_path), 1, min_supervised=9)


def test_an_empty_side_of_a_split_is_refused(cache) -> None:
    with pytest.raises(ValueError, match="of the validation side of 11 samples, 0 are not good"):
        loader_of(cache, 1, split="validation", validation_fraction=1e-9)


@settings(max_examples=20)
@given(fraction=st.floats(0.2, 0.8), seed=st.integers(0, 2**64 - 1))
def test_a_split_is_disjoint_and_covers_the_store(cache, fraction, seed) -> None:
    sides = []
    for side in ("train", "validation"):
        try:
            options = {"split": side, "validation_fraction": fraction, "split_seed": seed}
            sides.append(samples_of(loader_of(cache, 3, **options)))
        except ValueError:
            sides.append([])
    assert sorted(sides[0] + sides[1]) == list(range(len(LENGTHS)))


def test_a_split_stays_when_the_corpus_grows(tmp_path: Path) -> None:
    def validation(lengths: Sequence[int], name: str) -> list[int]:
        store = build_store(tmp_path / name, lengths=lengths, shape=Shape(shard_size=4), weights=False)
        loader = loader_of(open_cache(store.path), 1, split="validation", validation_fraction=0.4)
        samples: list[int] = loader.samples.tolist()
        return samples

    small, large = validation(LENGTHS, "small"), validation(LENGTHS + LENGTHS, "large")
    assert small
    assert [sample for sample in large if sample < len(LENGTHS)] == small
