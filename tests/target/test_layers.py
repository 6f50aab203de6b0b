import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import Gemma4TextConfig, LlamaConfig, Qwen3Config

from dspark_store.target.layers import (
    build_target_layer_ids,
    cut_target_config,
    resolve_reduced_target_layers,
    validate_target_layer_ids,
)
from dspark_store.target.load import load_target
from dspark_store.target.source import TargetSource
from tests.tiny import NUM_LAYERS, save_tiny, since_5_24, tiny_gpt2, tiny_llama


@pytest.mark.parametrize(("requested", "kept"), [(None, None), (4, 4), ("4", 4), (43, 43), (1, 1)])
def test_a_cut_keeps_as_many_layers_as_requested(requested, kept):
    assert resolve_reduced_target_layers(43, requested) == kept


@pytest.mark.parametrize("requested", [0, -1, 44, 100, "none", "", "4.5", 4.0, True])
def test_a_cut_outside_of_the_target_is_refused_by_name(requested):
    with pytest.raises(ValueError, match=r"target_num_hidden_layers .*\[1, 43\]") as error:
        resolve_reduced_target_layers(43, requested)
    assert repr(requested) in str(error.value)


def test_lists_with_an_entry_a_layer_are_cut_and_others_are_not():
    types = ["full_attention", "sliding_attention"] * 2
    config = Qwen3Config(num_hidden_layers=4, layer_types=types, eos_token_id=[1, 2, 3, 4])
    config.of_each_layer, config.of_others = [1, 2, 3, 4], [1, 2, 3]
    cut = cut_target_config(config, 2)
    assert (cut.num_hidden_layers, cut.layer_types, cut.of_each_layer) == (2, types[:2], [1, 2])
    assert (cut.eos_token_id, cut.of_others) == ([1, 2, 3, 4], [1, 2, 3])
    assert (config.num_hidden_layers, config.layer_types) == (4, types)


def test_layers_that_shared_the_keys_of_earlier_ones_still_do():
    types = ["sliding_attention", "full_attention"] * 3
    config = Gemma4TextConfig(
        num_hidden_layers=6, layer_types=types, num_kv_shared_layers=3, hidden_size_per_layer_input=0
    )
    shared = [cut_target_config(config, layers).num_kv_shared_layers for layers in (6, 5, 3, 2)]
    assert shared == [3, 2, 0, 0]


@since_5_24
def test_overrides_of_the_layers_cut_off_are_dropped():
    types = ["sliding_attention", "full_attention"] * 2
    config = Gemma4TextConfig(num_hidden_layers=4, layer_types=types, hidden_size_per_layer_input=0, head_dim=8)
    heads = [layer.head_dim for layer in cut_target_config(config, 3).per_layer_config]
    assert heads == [8, 512, 8]


def test_a_cut_to_the_whole_depth_changes_nothing():
    config = LlamaConfig(num_hidden_layers=4)
    assert cut_target_config(config, 4).to_dict() == config.to_dict()
    with pytest.raises(ValueError, match="target_num_hidden_layers 5"):
        cut_target_config(config, 5)


def load(directory, num_layers):
    source = TargetSource(str(directory))
    return load_target(source, dtype=torch.float32, device=torch.device("cpu"), num_layers=num_layers)


def test_weights_of_the_layers_cut_off_may_be_absent_and_those_of_others_not(tmp_path):
    path = save_tiny(tiny_llama(), tmp_path) / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if ".layers.3." not in name}
    save_file(kept, path, metadata={"format": "pt"})
    assert len(load(tmp_path, 3).model.layers) == 3
    with pytest.raises(ValueError, match=r"lacks model\.layers\.3"):
        load(tmp_path, NUM_LAYERS)


def test_a_depth_under_another_name_is_cut_too(tmp_path):
    target = load(save_tiny(tiny_gpt2(), tmp_path), 2)
    assert (target.config.n_layer, len(target.transformer.h)) == (2, 2)


@pytest.mark.parametrize(
    ("num_layers", "count", "expected"),
    [
        (2, 5, [1]),
        (4, 2, [1, 3]),
        (4, 5, [1, 2, 3]),
        (6, 3, [1, 3, 5]),
        (8, 4, [1, 3, 5, 7]),
        (8, 5, [1, 2, 4, 6, 7]),
        (28, -3, [27]),
        (28, 5, [1, 8, 14, 20, 27]),
        (62, 5, [1, 16, 31, 46, 61]),
        (78, 3, [1, 39, 77]),
    ],
)
def test_default_ids_match_the_table(num_layers, count, expected):
    assert build_target_layer_ids(num_layers, count) == expected


def test_a_target_of_one_layer_has_no_default_ids():
    with pytest.raises(ValueError, match="target of 1 layers"):
        build_target_layer_ids(1, 5)


@given(st.integers(2, 200), st.integers(-5, 250))
def test_default_ids_are_valid_and_end_in_the_last_layer(num_layers, count):
    ids = build_target_layer_ids(num_layers, count)
    assert validate_target_layer_ids(ids, num_layers, explicit=False) == ids
    assert ids[-1] == num_layers - 1
    assert len(ids) == min(max(count, 1), num_layers - 1)


@pytest.mark.parametrize("ids", [[], [1, 1], [2, 1], [-2, 1], [0, 4], [0, 1.5], ["0"]])
def test_ids_that_do_not_fit_are_refused_by_name_and_range(ids):
    with pytest.raises(ValueError, match=r"layer ids \[.*each -1 or in \[0, 3\]") as error:
        validate_target_layer_ids(ids, 4)
    assert str(ids) in str(error.value)


def test_chosen_ids_that_sglang_cannot_serve_give_one_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert validate_target_layer_ids([-1, 1, 3], 4) == [-1, 1, 3]
        validate_target_layer_ids([0, 1, 2], 4)
        validate_target_layer_ids([1, 3], 4, explicit=False)
    (record,) = caplog.records
    assert "SGLang" in record.getMessage()
    assert "3" in record.getMessage()
