"""Tiny random targets, tokenizers and chats that the tests share: seeded, and built in well under a second."""

import json
import random
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from dspark_store.target.parallel import SHARES_SINCE, is_transformers

since_5_24 = pytest.mark.skipif(not is_transformers(SHARES_SINCE), reason=f"needs transformers {SHARES_SINCE}")
NUM_LAYERS = 4
HIDDEN_SIZE = 32
VOCAB_SIZE = 288  # 256 bytes and the special tokens, rounded up to a multiple of 32
PAD, EOS = "<pad>", "<eos>"
SPECIAL_TOKENS = (PAD, EOS, "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>")

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_DENSE_SHAPE = {**_SHAPE, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 1024}
_LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
}
_GEMMA4_SHAPE = {
    **_DENSE_SHAPE,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 16,
    "final_logit_softcapping": 30.0,
    "layer_types": ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2),
    "hidden_size_per_layer_input": 0,
}
_GEMMA4_SHARING = {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 2,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": HIDDEN_SIZE}
_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>GENERATION{{ message['content'] }}<|end|>ENDGENERATION"
    "{% else %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TEXT = "the a store keeps what one model said while small drafts learn from disk and never wait for it again"


def tiny_llama(seed: int = 0, **changes: Any) -> PreTrainedModel:
    return _built(LlamaForCausalLM, LlamaConfig(**{**_DENSE_SHAPE, **changes}), seed)


def tiny_qwen3(seed: int = 0, **changes: Any) -> PreTrainedModel:
    return _built(Qwen3ForCausalLM, Qwen3Config(**{**_DENSE_SHAPE, "head_dim": 8, **changes}), seed)


def tiny_qwen3_moe(seed: int = 0, **changes: Any) -> PreTrainedModel:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
    return _built(Qwen3MoeForCausalLM, Qwen3MoeConfig(**{**_DENSE_SHAPE, **experts, **changes}), seed)


def tiny_gemma(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Gemma 3, text only: a scaled embedding tied to a head whose logits are soft-capped."""
    own = {"head_dim": 8, "sliding_window": 16, "final_logit_softcapping": 30.0}
    return _built(Gemma3ForCausalLM, Gemma3TextConfig(**{**_DENSE_SHAPE, **own, **changes}), seed)


def tiny_deepseek_v4(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """DeepSeek V4: each layer gives (B, S, 4, H), four streams of hyper-connections."""
    own = {
        "moe_intermediate_size": 32,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 4,
        "sliding_window": 16,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    }
    return _built(DeepseekV4ForCausalLM, DeepseekV4Config(**{**_SHAPE, **own, **changes}), seed)


def tiny_glm_moe_dsa(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """GLM with sparse attention: a dense layer, then experts; each layer chooses the 4 keys that it attends to."""
    own = {**_LATENT_ATTENTION, "q_lora_rank": 16, "n_routed_experts": 4, "first_k_dense_replace": 1}
    indexer = {"index_topk": 4, "index_head_dim": 16, "index_n_heads": 2}
    return _built(GlmMoeDsaForCausalLM, GlmMoeDsaConfig(**{**_DENSE_SHAPE, **own, **indexer, **changes}), seed)


def tiny_kimi_linear(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Kimi Linear: linear attention and full attention by turns, without positions. Skips where there is none."""
    transformers = pytest.importorskip("transformers", SHARES_SINCE, reason="this transformers has no kimi_linear")
    own = {**_LATENT_ATTENTION, "num_local_experts": 4, "linear_head_dim": 8, "linear_num_heads": 4}
    turns = {"layer_types": ["linear_attention", "full_attention"] * (NUM_LAYERS // 2)}
    return _built(
        transformers.KimiLinearForCausalLM,
        transformers.KimiLinearConfig(**{**_DENSE_SHAPE, **own, **turns, **changes}),
        seed,
    )


def tiny_gemma4(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Gemma 4, text only: layers of two head sizes, inputs for each layer, and two layers without keys of their own."""
    return _built(Gemma4ForCausalLM, Gemma4TextConfig(**{**_GEMMA4_SHAPE, **_GEMMA4_SHARING, **changes}), seed)


def tiny_gemma4_nested(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Gemma 4 with its text part in a multimodal configuration, as published; without other towers."""
    text = {**_GEMMA4_SHAPE, **_GEMMA4_SHARING, **changes}
    return _built(Gemma4ForConditionalGeneration, Gemma4Config(text_config=text), seed)


def tiny_qwen2_5_vl(seed: int = 0, *, tied: bool = False, **changes: Any) -> PreTrainedModel:
    """Qwen2.5-VL: a text model with positions in three dimensions beside a vision tower; no causal class of its own."""
    text = {**_DENSE_SHAPE, "rope_parameters": _MROPE, "tie_word_embeddings": tied, **changes}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=_VISION, tie_word_embeddings=tied)
    return _built(Qwen2_5_VLForConditionalGeneration, config, seed)


def tiny_qwen3_vl(seed: int = 0, *, tied: bool = False, **changes: Any) -> PreTrainedModel:
    """Qwen3-VL: as Qwen2.5-VL, with images that enter after several layers."""
    text = {**_DENSE_SHAPE, "head_dim": 8, "rope_parameters": _MROPE, "tie_word_embeddings": tied, **changes}
    vision = {**_VISION, "deepstack_visual_indexes": [0]}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    return _built(Qwen3VLForConditionalGeneration, config, seed)


def tiny_mistral3(seed: int = 0, *, tied: bool = False, **changes: Any) -> PreTrainedModel:
    """Mistral 3: a Mistral beside a Pixtral."""
    text = {**_DENSE_SHAPE, "model_type": "mistral", "head_dim": 8, "tie_word_embeddings": tied, **changes}
    vision = {"model_type": "pixtral", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"intermediate_size": 32}
    config = Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    return _built(Mistral3ForConditionalGeneration, config, seed)


def tiny_gpt2(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """GPT-2: layers under `transformer.h`, learned positions added to the embedding, a tied head."""
    shape = {"n_embd": HIDDEN_SIZE, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 1024, "vocab_size": VOCAB_SIZE}
    tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    return _built(GPT2LMHeadModel, GPT2Config(**{**shape, **tokens, **changes}), seed)


def tiny_tokenizer(kind: Literal["tagged", "plain"] = "tagged") -> PreTrainedTokenizerFast:
    """One token a byte, so that any text works; the chat template has generation tags when `kind` is "tagged"."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=EOS)
    tags = ("{% generation %}", "{% endgeneration %}") if kind == "tagged" else ("", "")
    tokenizer.chat_template = _TEMPLATE.replace("ENDGENERATION", tags[1]).replace("GENERATION", tags[0])
    return tokenizer


def save_tiny(model: PreTrainedModel, directory: str | PathLike[str]) -> Path:
    """Write the model's configuration and one safetensors file; return the directory."""
    model.save_pretrained(directory)
    return Path(directory)


def save_target_dir(
    directory: str | PathLike[str],
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Path:
    """Write a directory that `load_target` and `load_tokenizer` read: a tiny Llama and tagged tokenizer by default."""
    save_tiny(model if model is not None else tiny_llama(), directory)
    (tokenizer if tokenizer is not None else tiny_tokenizer()).save_pretrained(directory)
    return Path(directory)


def write_chats(path: str | PathLike[str], n: int, seed: int = 0) -> Path:
    """Write `n` chats of one to four turns as JSONL, some opened by a system message; lengths vary about tenfold."""
    rng = random.Random(seed)
    rows = [json.dumps({"messages": _chat(rng)}, ensure_ascii=False) + "\n" for _ in range(n)]
    Path(path).write_text("".join(rows), encoding="utf-8")
    return Path(path)


def _chat(rng: random.Random) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": _sentence(rng, 4)}] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": _sentence(rng, 6)})
        messages.append({"role": "assistant", "content": _sentence(rng, 10)})
    return messages


def _sentence(rng: random.Random, longest: int) -> str:
    return " ".join(rng.choices(_TEXT.split(), k=rng.randint(1, longest)))


def _built(model_class: Any, config: Any, seed: int) -> PreTrainedModel:
    """Build with norms that differ from one, so that a state before a norm is not the one after it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in name:
                parameter.data += 0.1 * torch.randn(parameter.shape)
    model.eval()
    return model
