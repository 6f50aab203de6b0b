import json
import logging
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AyaVisionConfig,
    AyaVisionForConditionalGeneration,
    Gemma3Config,
    GPTJConfig,
    LlamaConfig,
    Mamba2Config,
    OPTConfig,
)

from dspark_store.target.facts import check_fits, head_facts, rebuild_config, target_config_json, target_weights
from dspark_store.target.load import text_config
from tests.tiny import (
    HIDDEN_SIZE,
    VOCAB_SIZE,
    since_5_24,
    tiny_deepseek_v4,
    tiny_gemma,
    tiny_gpt2,
    tiny_llama,
    tiny_qwen3,
    tiny_qwen3_moe,
)

FAMILIES = [tiny_llama, tiny_qwen3, tiny_qwen3_moe, tiny_gemma, tiny_deepseek_v4, tiny_gpt2]
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def test_a_plain_head_has_no_facts_to_tell():
    assert head_facts(tiny_llama()) == {
        "head_bias": False,
        "logit_scale": None,
        "final_logit_softcapping": None,
        "embedding_scale": None,
        "tied": False,
    }


def test_gemma_tells_its_softcap_and_embedding_scale():
    facts = head_facts(tiny_gemma())
    assert facts["final_logit_softcapping"] == 30.0
    assert facts["embedding_scale"] == pytest.approx(HIDDEN_SIZE**0.5)
    assert facts["tied"] is True


@pytest.mark.parametrize(
    ("family", "scales", "logit_scale", "embedding_scale"),
    [
        ("Cohere", {"logit_scale": 0.25}, 0.25, None),
        ("Granite", {"logits_scaling": 8.0, "embedding_multiplier": 12.0}, 0.125, 12.0),
        pytest.param(
            *("HyperCLOVAX", {"logits_scaling": 8.0, "embedding_multiplier": 3.0}, 8.0, 3.0), marks=since_5_24
        ),
    ],
)
def test_the_scales_are_the_ones_that_the_model_applies(family, scales, logit_scale, embedding_scale):
    config = getattr(transformers, f"{family}Config")(**SHAPE, **scales)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    facts = head_facts(model)
    assert (facts["logit_scale"], facts["embedding_scale"]) == (logit_scale, embedding_scale)
    embed, head, _ = target_weights(model)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        output = model(input_ids=ids, output_hidden_states=True)
    assert torch.allclose(output.hidden_states[0], embed[ids] * (embedding_scale or 1.0), atol=1e-6)
    assert torch.allclose(output.logits, output.hidden_states[-1] @ head.T * logit_scale, atol=1e-5)


def test_a_head_bias_is_told_and_returned():
    model = tiny_llama()
    model.lm_head = torch.nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, bias=True)
    _, _, bias = target_weights(model)
    assert head_facts(model)["head_bias"] is True
    assert bias is not None
    assert bias.shape == (VOCAB_SIZE,)


@pytest.mark.parametrize("build", FAMILIES)
def test_a_configuration_tells_the_same_as_its_model(build):
    model = build()
    assert head_facts(model.config) == head_facts(model)


@pytest.mark.parametrize("build", FAMILIES)
def test_the_head_weight_makes_the_targets_logits(build):
    model = build()
    embed, head, bias = target_weights(model)
    assert embed.shape == head.shape == (VOCAB_SIZE, HIDDEN_SIZE)
    assert bias is None
    assert not embed.requires_grad
    with torch.no_grad():
        output = model(input_ids=torch.arange(8)[None], output_hidden_states=True)
        expected = output.hidden_states[-1] @ head.T
    cap = head_facts(model)["final_logit_softcapping"]
    if isinstance(cap, float):
        expected = cap * torch.tanh(expected / cap)
    assert torch.allclose(output.logits, expected, atol=1e-5)


@pytest.mark.parametrize(("side", "name"), [("embed_tokens", "input embedding"), ("lm_head", "output head")])
def test_a_side_without_weight_is_named(side, name):
    model = tiny_llama()
    owner = model.model if side == "embed_tokens" else model
    setattr(owner, side, torch.nn.Identity())
    with pytest.raises(ValueError, match=f"the {name} of LlamaForCausalLM has no .weight"):
        target_weights(model)


@pytest.mark.parametrize("build", FAMILIES)
def test_a_configuration_survives_the_way_through_json(build):
    model = build()
    fields = json.loads(json.dumps(target_config_json(model.config), allow_nan=False))
    rebuilt = rebuild_config(fields)
    assert type(rebuilt) is type(model.config)
    assert target_config_json(rebuilt) == fields
    assert type(model)(rebuilt).num_parameters() == model.num_parameters()


def test_infinite_numbers_survive_the_way_through_json():
    fields = json.loads(json.dumps(target_config_json(Mamba2Config()), allow_nan=False))
    assert list(rebuild_config(fields).time_step_limit) == [0.0, float("inf")]


def test_json_says_nothing_of_paths_versions_and_storage():
    config = tiny_llama().config
    config.name_or_path, config.dtype, config.quantization_config = "/somewhere", torch.bfloat16, {"bits": 4}
    text = json.dumps(target_config_json(config))
    for word in ("somewhere", "bfloat16", "bits", "transformers_version"):
        assert word not in text


def test_only_the_text_part_of_a_multimodal_configuration_is_kept():
    config = Gemma3Config()
    assert text_config(config) is config.text_config
    assert target_config_json(config)["model_type"] == "gemma3_text"
    assert text_config(config.text_config) is config.text_config


def test_an_unknown_model_type_cannot_be_rebuilt():
    with pytest.raises(ValueError, match="model_type='strange'"):
        rebuild_config({"model_type": "strange"})


def test_a_scale_that_a_model_with_images_leaves_out_is_none_of_its_head():
    vision = {**SHAPE, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14}
    config = AyaVisionConfig(text_config={**SHAPE, "model_type": "cohere2", "logit_scale": 0.5}, vision_config=vision)
    model = AyaVisionForConditionalGeneration(config).eval()
    ids = torch.arange(5)[None]
    with torch.no_grad():
        out = model(input_ids=ids, output_hidden_states=True)
    head = target_weights(model)[1]
    assert head_facts(model)["logit_scale"] is None
    torch.testing.assert_close(out.hidden_states[-1] @ head.T, out.logits)


LLAMA = LlamaConfig(vocab_size=300, max_position_embeddings=512)
SMALL: dict[str, Any] = {"vocab_size": 300, "hidden_size": 32, "num_attention_heads": 4, "pad_token_id": 0}
TABLES = {
    "learned": tiny_gpt2(n_positions=512).config,
    "learned, with spare rows": OPTConfig(**SMALL, max_position_embeddings=512, ffn_dim=32, word_embed_proj_dim=32),
    "computed": GPTJConfig(vocab_size=300, n_positions=512, n_embd=32, n_layer=1, n_head=4, rotary_dim=4),
}


def warnings_of(caplog, config, seq_length, vocab_size=100):
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="dspark_store"):
        check_fits(config, seq_length, vocab_size)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("config", TABLES.values(), ids=TABLES.keys())
def test_more_positions_than_a_table_has_are_refused(config, caplog):
    assert warnings_of(caplog, config, 512) == []
    with pytest.raises(
        ValueError, match=r"seq-length 513 does not fit .* has 512 rows: pass --seq-length 512"
    ) as error:
        check_fits(config, 513, 100)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", ["Llama", pytest.param("KimiLinear", marks=since_5_24)])
def test_positions_past_those_of_a_target_without_a_table_give_one_warning(family, caplog):
    config = getattr(transformers, f"{family}Config")(num_hidden_layers=2, max_position_embeddings=512)
    assert warnings_of(caplog, config, 512) == []
    (warning,) = warnings_of(caplog, config, 513)
    assert f"513 is beyond the 512 positions that the {config.model_type} target" in warning


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_gives_a_warning_with_both(caplog):
    assert warnings_of(caplog, LLAMA, 10, 300) == []
    (warning,) = warnings_of(caplog, LLAMA, 10, 301)
    assert "ids up to 300" in warning
    assert "300 embedding rows" in warning
