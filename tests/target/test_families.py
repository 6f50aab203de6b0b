"""Each kind of target that recipes name: saved, loaded and captured, whole and cut to its first layers."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from dspark_store.target.capture import TargetCapture
from dspark_store.target.facts import head_facts, rebuild_config, target_config_json, target_weights
from dspark_store.target.load import load_target
from dspark_store.target.source import TargetSource
from tests.tiny import (
    HIDDEN_SIZE,
    NUM_LAYERS,
    VOCAB_SIZE,
    save_tiny,
    since_5_24,
    tiny_deepseek_v4,
    tiny_gemma4,
    tiny_gemma4_nested,
    tiny_glm_moe_dsa,
    tiny_kimi_linear,
    tiny_llama,
    tiny_mistral3,
    tiny_qwen2_5_vl,
    tiny_qwen3,
    tiny_qwen3_moe,
    tiny_qwen3_vl,
)

EVERY_LAYER = [-1, *range(NUM_LAYERS)]
BATCH_SHAPES = [(2, 13), (3, 21)]
PLAIN_GEMMA4 = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}


def tiny_kimi_k3():
    shape = {"hidden_size": HIDDEN_SIZE, "num_hidden_layers": NUM_LAYERS, "vocab_size": VOCAB_SIZE}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("kimi_k3", **shape)).eval()


kimi_k3 = pytest.param(
    tiny_kimi_k3,
    marks=pytest.mark.skipif("kimi_k3" not in CONFIG_MAPPING, reason="this transformers has no kimi_k3"),
)


def tiny_plain_gemma4():
    return tiny_gemma4(**PLAIN_GEMMA4)


def tiny_plain_gemma4_nested():
    return tiny_gemma4_nested(**PLAIN_GEMMA4)


CUTTABLE = [tiny_llama, tiny_qwen3, tiny_qwen3_moe, tiny_deepseek_v4, tiny_glm_moe_dsa, tiny_kimi_linear, kimi_k3]
BESIDE_IMAGES = [tiny_qwen2_5_vl, tiny_qwen3_vl, tiny_mistral3]
"""Text models that transformers has no causal class for, and runs beside a vision tower."""
PLAIN = [tiny_plain_gemma4, tiny_plain_gemma4_nested]
PACKED = [tiny_gemma4, tiny_gemma4_nested]


def load(directory, **options):
    return load_target(TargetSource(str(directory)), dtype=torch.float32, device=torch.device("cpu"), **options)


def batch(rows, length):
    """Ids and a mask whose last row ends in padding."""
    ids = torch.randint(0, VOCAB_SIZE, (rows, length), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    mask[-1, -4:] = 0
    return ids, mask


def hidden_states(model, ids, mask):
    with torch.no_grad():
        states = model(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False).hidden_states
    return [state.mean(dim=2) if state.dim() == 4 else state for state in states]


@pytest.mark.parametrize("build", [*CUTTABLE, *PACKED])
def test_a_loaded_target_gives_the_states_of_the_saved_one_at_every_layer(build, tmp_path):
    model = build()
    target = load(save_tiny(model, tmp_path))
    capture = TargetCapture(target, EVERY_LAYER)
    for rows, length in BATCH_SHAPES:
        ids, mask = batch(rows, length)
        captured, expected = capture(ids, mask), hidden_states(model, ids, mask)
        assert all(torch.equal(*pair) for pair in zip(captured.layers, expected, strict=True))
        assert torch.equal(captured.last, expected[-1])
    assert head_facts(rebuild_config(target_config_json(target.config))) == head_facts(model)


@pytest.mark.parametrize(("build", "tied"), [*zip(BESIDE_IMAGES, [False, True, False], strict=True)])
def test_a_text_model_beside_images_gives_the_states_and_logits_of_a_direct_forward(build, tied, tmp_path):
    model = build(tied=tied)
    target = load(save_tiny(model, tmp_path))
    assert type(target) is type(model)
    capture = TargetCapture(target, EVERY_LAYER)
    embed, head, bias = target_weights(target)
    assert bias is None
    assert (head is embed, head_facts(target)["tied"]) == (tied, tied)
    for rows, length in BATCH_SHAPES:
        ids, mask = batch(rows, length)
        captured, expected = capture(ids, mask), hidden_states(model, ids, mask)
        for state, other in zip((*captured.layers, captured.last), (*expected, expected[-1]), strict=True):
            assert torch.equal(state[mask == 1], other[mask == 1])
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        assert torch.equal((captured.last @ head.T)[mask == 1], logits[mask == 1])
    text = rebuild_config(target_config_json(target.config))
    assert (text.num_hidden_layers, text.hidden_size) == (NUM_LAYERS, HIDDEN_SIZE)


@pytest.mark.parametrize(
    "build",
    [*CUTTABLE, *BESIDE_IMAGES, *(pytest.param(each, marks=since_5_24) for each in PLAIN)],
)
def test_the_first_layers_of_a_target_give_the_same_states_without_the_others(build, tmp_path):
    model = build()
    ids, mask = batch(2, 13)
    directory, expected = save_tiny(model, tmp_path), hidden_states(model, ids, mask)
    base = getattr(model.model, "language_model", model.model)
    for depth in (1, 3):  # Gemma 4's third layer is of a kind that its last one never is
        target = load(directory, num_layers=depth)
        captured = TargetCapture(target, range(-1, depth))(ids, mask)
        assert all(torch.equal(*pair) for pair in zip(captured.layers[:-1], expected[:depth], strict=True))
        assert captured.last.shape == (2, 13, HIDDEN_SIZE)
        if build is not tiny_deepseek_v4:  # it joins its streams by weights of its own before the norm
            assert torch.equal(captured.last, base.norm(output_of(base.layers[depth - 1], model, ids, mask)))
        fields = target_config_json(target.config)
        assert fields["num_hidden_layers"] == depth
        assert target_config_json(rebuild_config(fields)) == fields


def output_of(module, model, ids, mask):
    kept: list[torch.Tensor] = []
    handle = module.register_forward_hook(
        lambda _module, _args, output: kept.append(output[0] if isinstance(output, tuple) else output)
    )
    hidden_states(model, ids, mask)
    handle.remove()
    return kept[0]


@pytest.mark.parametrize("build", PACKED)
def test_a_target_that_packs_inputs_of_all_layers_cannot_be_cut(build, tmp_path):
    with pytest.raises(ValueError, match="target_num_hidden_layers 2 cannot be applied to a gemma4_text target"):
        load(save_tiny(build(), tmp_path), num_layers=2)
