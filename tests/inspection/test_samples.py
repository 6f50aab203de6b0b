"""Single samples of a store: tokens, the tokenizer of its target without the network, and norms of states."""

import math

import numpy as np
import pytest
import torch

from dspark_store import DamagedStoreError, open_cache
from dspark_store.inspection.samples import SampleReader, find_tokenizer, measure
from dspark_store.sources.identity import tokenizer_sha256
from tests.stores import RAGGED, build_store, flip
from tests.tiny import tiny_tokenizer


def reader_of(store):
    return SampleReader(open_cache(store.path, allow_incomplete=True))


@pytest.mark.parametrize("until", ["tokens", "states", "complete"])
def test_tokens_are_those_that_were_written_in_every_phase(tmp_path, until):
    store = build_store(tmp_path / "s", until=until)
    reader = reader_of(store)
    assert reader.samples == len(RAGGED)
    for number, sample in enumerate(store.samples):
        tokens = reader.tokens(number)
        assert np.array_equal(tokens.input_ids, sample.ids)
        assert np.array_equal(tokens.loss_mask, sample.mask)
        assert reader.has_states(number) == (until != "tokens")


def test_norms_are_those_of_the_layers_asked_for_and_of_the_last_states(tmp_path):
    store = build_store(tmp_path / "s")
    found = reader_of(store).norms(4, [5, 2])
    assert [norms.layer_id for norms in found] == [5, 2, None]
    for norms, states in zip(found, (*store.samples[4].layers[[2, 0]], store.samples[4].last), strict=True):
        expected = np.linalg.norm(states.double().numpy(), axis=1)
        assert norms.mean_norm == pytest.approx(expected.mean())
        assert (norms.least_norm, norms.most_norm) == pytest.approx((expected.min(), expected.max()))
        assert (norms.least, norms.most, norms.nonfinite) == (float(states.min()), float(states.max()), 0)


def test_values_that_are_not_finite_are_counted_and_left_out():
    states = torch.tensor([[3.0, 4.0], [math.inf, math.nan], [0.0, 0.0]], dtype=torch.bfloat16)
    norms = measure(7, states)
    assert (norms.mean_norm, norms.least_norm, norms.most_norm, norms.most, norms.nonfinite) == (2.5, 0, 5, 4, 2)


@pytest.mark.parametrize("states", [torch.empty(0, 4), torch.full((2, 4), math.nan)])
def test_without_a_finite_token_there_is_no_norm(states):
    norms = measure(None, states)
    assert math.isnan(norms.mean_norm)
    assert norms.nonfinite == states.numel()


def test_a_sample_that_is_not_there_is_refused(tmp_path):
    reader = reader_of(build_store(tmp_path / "s", until="tokens", lengths=(4,) * 5))
    reader.check(4)
    for sample in (-1, 5):
        with pytest.raises(ValueError, match=rf"sample {sample} is not in the store .* it has 5 samples so far"):
            reader.check(sample)


def test_damaged_tokens_are_an_error(tmp_path):
    store = build_store(tmp_path / "s")
    flip(store.path / "input_ids/c.0.0", 5)
    with pytest.raises(DamagedStoreError, match="input_ids"):
        reader_of(store).tokens(0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "it"
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def test_the_target_is_taken_where_it_is(saved):
    found = find_tokenizer({"target_model": saved, "target_revision": ""})
    assert found.tokenizer is not None
    assert found.note == ""


def test_one_that_is_given_comes_first_and_another_than_the_stores_is_told(saved):
    right = tokenizer_sha256(tiny_tokenizer())
    for recorded, told in ((right, False), ("0" * 64, True)):
        found = find_tokenizer({"target_model": "/gone", "tokenizer_sha256": recorded}, saved)
        assert found.tokenizer is not None
        assert ("not the tokenizer that the store was made with" in found.note) == told


@pytest.mark.parametrize("model", ["/gone/away", "nobody/nothing-here", "a/b/c", None])
def test_a_target_that_is_not_here_leaves_ids_and_says_what_to_do(model):
    found = find_tokenizer({"target_model": model, "target_revision": "main"})
    assert found.tokenizer is None
    assert "--tokenizer" in found.note


def test_one_that_is_given_and_cannot_be_loaded_is_a_mistake():
    with pytest.raises(ValueError, match="there is no such directory"):
        find_tokenizer({}, "/gone/away")
