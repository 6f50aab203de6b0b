import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4TextConfig, LlamaConfig, Qwen3Config

from dspark_store.target.depth import cut_target_config, resolve_reduced_target_layers
from dspark_store.target.load import load_target
from dspark_store.target.source import TargetSource
from tests.tiny import NUM_LAYERS, save_tiny, tiny_gpt2, tiny_llama


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
