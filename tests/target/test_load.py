import importlib.util
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from dspark_store.target.capture import TargetCapture
from dspark_store.target.device import resolve_compute_dtype
from dspark_store.target.facts import head_facts, target_weights
from dspark_store.target.load import (
    direct_placement,
    input_device,
    load_target,
    load_target_config,
    load_tokenizer,
    read_model_type,
)
from dspark_store.target.sharded import load_shaped_target
from dspark_store.target.source import TargetSource
from tests.tiny import (
    NUM_LAYERS,
    save_target_dir,
    save_tiny,
    since_5_24,
    tiny_deepseek_v4,
    tiny_gemma,
    tiny_glm_moe_dsa,
    tiny_gpt2,
    tiny_llama,
    tiny_qwen3_moe,
)

CPU = torch.device("cpu")


@pytest.fixture
def llama_dir(tmp_path):
    return save_target_dir(tmp_path / "llama", tiny_llama())


def load(directory, dtype=torch.float32, **options):
    return load_target(TargetSource(str(directory)), dtype=dtype, device=CPU, **options)


def change_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_loaded_target_is_frozen_and_equal_to_the_saved_one(llama_dir):
    target = load(llama_dir)
    assert not target.training
    assert not any(parameter.requires_grad for parameter in target.parameters())
    for name, tensor in tiny_llama().state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor)


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma, tiny_deepseek_v4])
def test_a_bf16_target_keeps_its_rotary_frequencies_in_fp32(build, tmp_path):
    model = build()
    target = load(save_tiny(model, tmp_path), dtype=torch.bfloat16)
    assert target.get_input_embeddings().weight.dtype == torch.bfloat16
    loaded = dict(target.named_buffers())
    frequencies = {name: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    assert frequencies
    for name, buffer in frequencies.items():
        assert loaded[name].dtype == torch.float32
        assert torch.equal(loaded[name], buffer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), r"lacks model\.layers\.1\.mlp\.up_proj\.w"),
        (lambda tensors: tensors.pop("lm_head.weight"), r"lacks lm_head\.weight"),
        (lambda tensors: [tensors.pop(name) for name in list(tensors)[:8]], "and 3 more"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}),
            r"holds model\.norm\.weight in another sh",
        ),
    ],
)
def test_weights_that_are_absent_or_of_another_shape_are_refused_by_name(llama_dir, change, message):
    change_weights(llama_dir, change)
    with pytest.raises(ValueError, match=message):
        load(llama_dir)


def test_a_tied_head_may_be_absent_from_the_checkpoint(tmp_path):
    directory = save_tiny(tiny_gpt2(), tmp_path)
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")
    target = load(directory)
    assert target.get_output_embeddings().weight is target.get_input_embeddings().weight


def test_the_attention_implementation_is_selectable(llama_dir):
    assert load(llama_dir, attn_implementation="eager").config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["nonsense", "flash_attention_2"])
def test_an_attention_implementation_that_cannot_run_is_refused_in_one_line(llama_dir, name):
    with pytest.raises(ValueError, match=f"attention '{name}'") as error:
        load(llama_dir, attn_implementation=name)
    assert "\n" not in str(error.value)


def test_the_configuration_is_loaded_without_weights(llama_dir):
    (llama_dir / "model.safetensors").unlink()
    assert load_target_config(TargetSource(str(llama_dir))).num_hidden_layers == NUM_LAYERS


def test_the_tokenizer_comes_with_its_template(llama_dir):
    tokenizer = load_tokenizer(TargetSource(str(llama_dir)))
    ids = tokenizer("hé <|end|>")["input_ids"]
    assert tokenizer.decode(ids) == "hé <|end|>"
    assert "{% generation %}" in tokenizer.chat_template


@pytest.mark.parametrize(
    ("model", "action"),
    [
        *((model, load_target_config) for model in ("nobody/nothing", "/no/such/dir", "x.gguf")),
        *((model, load_tokenizer) for model in ("nothing", "./none", "x.gguf")),
        *((model, read_model_type) for model in ("a/b/c", "not valid!")),
    ],
)
def test_an_unknown_model_is_named_in_one_line(action, model):
    with pytest.raises(ValueError, match=f"model '{model}'") as error:
        action(TargetSource(model))
    assert "\n" not in str(error.value)


def test_an_empty_model_is_refused():
    with pytest.raises(ValueError, match="model is empty"):
        load_target_config(TargetSource(""))


def test_a_file_that_is_no_gguf_is_refused(llama_dir):
    with pytest.raises(ValueError, match="is a file: expected"):
        load_target_config(TargetSource(str(llama_dir / "config.json")))


def test_a_directory_without_weights_is_refused_in_one_line(llama_dir):
    (llama_dir / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="cannot load the weights of model") as error:
        load(llama_dir)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["{", '{"model": {"type": "BPE", "vocab": {}, "merges": ["a b"]}}'])
def test_a_damaged_tokenizer_is_refused_in_one_line(llama_dir, content):
    (llama_dir / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match="cannot load the tokenizer of model") as error:
        load_tokenizer(TargetSource(str(llama_dir)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["{", '{"model_type": "strange"}', "{}"])
def test_a_configuration_that_cannot_be_used_is_refused_in_one_line(llama_dir, content):
    (llama_dir / "config.json").write_text(content)
    with pytest.raises(ValueError, match="cannot load the configuration of model") as error:
        load_target_config(TargetSource(str(llama_dir)))
    assert "\n" not in str(error.value)


def test_remote_code_is_refused_unless_allowed(llama_dir):
    change_config(llama_dir, model_type="own", auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    (llama_dir / "configuration_own.py").write_text(
        "from transformers import PretrainedConfig\n\n\nclass OwnConfig(PretrainedConfig):\n    model_type = 'own'\n"
    )
    with pytest.raises(ValueError, match="Set trust_remote_code"):
        load_target_config(TargetSource(str(llama_dir)))


def test_minimax_m3_vl_is_refused_before_its_configuration_is_built(llama_dir):
    change_config(llama_dir, model_type="minimax_m3_vl", hidden_size="not a number")
    source = TargetSource(str(llama_dir))
    assert read_model_type(source) == "minimax_m3_vl"
    for action in (lambda: load_target_config(source), lambda: load(llama_dir)):
        with pytest.raises(ValueError, match=r"model_type='minimax_m3_vl'.*multimodal"):
            action()


@pytest.mark.parametrize("attribute_map", ["installed", "of older versions"])
def test_a_glm_keeps_the_rope_dimension_of_its_file_beside_a_larger_head_dim(attribute_map, tmp_path, monkeypatch):
    model = tiny_glm_moe_dsa()
    directory = save_tiny(model, tmp_path)
    fields = json.loads((directory / "config.json").read_text()) | {"qk_rope_head_dim": 8, "head_dim": 24}
    del fields["qk_head_dim"]
    (directory / "config.json").write_text(json.dumps(fields))
    if attribute_map == "of older versions":
        monkeypatch.setitem(transformers.GlmMoeDsaConfig.attribute_map, "head_dim", "qk_rope_head_dim")
    as_read = transformers.AutoConfig.from_pretrained(directory)
    assert as_read.qk_rope_head_dim == (24 if "head_dim" in transformers.GlmMoeDsaConfig.attribute_map else 8)
    config = load_target_config(TargetSource(str(directory)))
    assert (config.qk_rope_head_dim, config.qk_head_dim, config.head_dim) == (8, 16, 8)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(load(directory)(ids).logits, model(ids).logits)


@since_5_24
@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma, tiny_qwen3_moe])
def test_a_target_that_is_offloaded_to_disk_gives_the_same_states_and_weights(build, tmp_path):
    pytest.importorskip("accelerate")
    model = build()
    directory, total = save_tiny(model, tmp_path), sum(parameter.nbytes for parameter in model.parameters())
    for memory in (total // 2, 2000):  # the second holds nothing, not even the embedding
        target = load(directory, device_map="auto", max_memory={"cpu": memory}, offload_folder=tmp_path / "offload")
        assert sum(parameter.device.type == "meta" for parameter in target.parameters()) > 10
        ids = torch.arange(26).view(2, 13).to(input_device(target))
        states = [TargetCapture(each, [-1, 1, 3])(ids, torch.ones_like(ids)) for each in (target, model)]
        assert all(torch.equal(*pair) for pair in zip(states[0].layers, states[1].layers, strict=True))
        embed, head, _ = target_weights(target)
        assert torch.equal(embed, target_weights(model)[0])
        assert torch.equal(head, target_weights(model)[1])
        assert (embed is head) == head_facts(target)["tied"] == head_facts(model)["tied"]


def test_without_a_device_map_inputs_go_to_the_embeddings_device(llama_dir):
    assert input_device(load(llama_dir)) == CPU


def test_a_device_map_without_accelerate_names_the_extra(llama_dir, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"device_map 'auto' needs accelerate.*dspark-store\["):
        load(llama_dir, device_map="auto")


def test_an_unknown_device_map_is_refused_in_one_line(llama_dir):
    with pytest.raises(ValueError, match="nowhere") as error:
        load(llama_dir, device_map="nowhere")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("auto", "cpu", torch.float32),
        ("auto", "cuda", torch.bfloat16),
        ("bf16", "cpu", torch.bfloat16),
        ("fp16", "cpu", torch.float16),
        ("fp32", "cuda", torch.float32),
    ],
)
def test_compute_dtypes_are_resolved_by_device(name, device, expected):
    assert resolve_compute_dtype(name, torch.device(device)) == expected


def test_an_unknown_compute_dtype_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'float8' is unknown: expected one of auto, bf16, fp16, fp32"):
        resolve_compute_dtype("float8", CPU)


CUDA = torch.device("cuda", 1)


def test_a_shared_out_target_that_accelerate_places_needs_it(llama_dir, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    source, config = TargetSource(str(llama_dir)), tiny_llama().config
    with pytest.raises(ImportError, match=r"onto cuda:1 needs accelerate, not installed: .*dspark-store\[accelerate\]"):
        load_shaped_target(source, LlamaForCausalLM, config, lambda model: None, dtype=torch.float32, device=CUDA)


@pytest.mark.parametrize(("device", "placement"), [(CPU, {}), (CUDA, {"device_map": {"": CUDA}})])
def test_weights_are_placed_on_an_accelerator_where_accelerate_is_installed(device, placement, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "accelerate")
    assert direct_placement(device) == placement
