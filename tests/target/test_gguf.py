import importlib.util

import numpy as np
import pytest
import torch

from dspark_store.target.capture import TargetCapture
from dspark_store.target.facts import target_config_json, target_weights
from dspark_store.target.fingerprint import target_fingerprint
from dspark_store.target.load import load_target, load_target_config, load_tokenizer, read_model_type
from dspark_store.target.source import TargetSource
from tests.tiny import SPECIAL_TOKENS, VOCAB_SIZE, tiny_llama

gguf = pytest.importorskip("gguf")
CPU = torch.device("cpu")
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name):
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def interleaved(weight, heads):
    """Rows of a query or key projection in the order in which GGUF keeps a Llama's rotary pairs."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path, model):
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(VOCAB_SIZE)
    writer.add_tokenizer_model("gpt2")
    tokens = [*SPECIAL_TOKENS, "a", "b", "ab"]
    writer.add_token_list([*tokens, *(f"unused {index}" for index in range(VOCAB_SIZE - len(tokens)))])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(1)
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            values = interleaved(values, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model():
    return tiny_llama(num_hidden_layers=2)


@pytest.fixture(scope="module")
def source(model, tmp_path_factory):
    return TargetSource(str(write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model)))


def test_a_gguf_configuration_is_read_from_its_header(source, model):
    config = load_target_config(source)
    assert read_model_type(source) == config.model_type == "llama"
    assert config.num_hidden_layers == 2
    assert config.vocab_size == VOCAB_SIZE
    assert config.rope_parameters == model.config.rope_parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gguf_target_gives_the_states_of_the_model_that_it_holds(source, model, dtype):
    target = load_target(source, dtype=dtype, device=CPU)
    embed, _, _ = target_weights(target)
    assert torch.equal(embed, target_weights(model)[0].to(dtype))
    ids = torch.arange(12)[None]
    captured, expected = (TargetCapture(each, [-1, 0])(ids, torch.ones_like(ids)) for each in (target, model))
    tolerance = 1e-6 if dtype == torch.float32 else 0.1
    for state, other in zip((*captured.layers, captured.last), (*expected.layers, expected.last), strict=True):
        assert torch.allclose(state.float(), other, atol=tolerance)


def test_a_gguf_configuration_is_the_same_before_and_after_loading(source):
    target = load_target(source, dtype=torch.float32, device=CPU)
    assert target_config_json(target.config) == target_config_json(load_target_config(source))


def test_a_gguf_tokenizer_is_loaded(source):
    assert load_tokenizer(source)("abb")["input_ids"] == [len(SPECIAL_TOKENS) + 2, len(SPECIAL_TOKENS) + 1]


def test_a_gguf_fingerprint_does_not_depend_on_the_name(source, model, tmp_path):
    other = TargetSource(str(write_gguf(tmp_path / "renamed.gguf", model)))
    assert target_fingerprint(other) == target_fingerprint(source)


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_package_names_the_extra(source, package, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == package else find_spec(name))
    with pytest.raises(ImportError, match=rf"needs {package}.*dspark-store\[gguf\]"):
        load_target(source, dtype=torch.float32, device=CPU)
