"""A stored sample is, bit by bit, what a plain forward of the target gives on the same batch."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import dspark_store as ds
from tests.precompute.jobs import differing_samples, precompute
from tests.tiny import (
    save_target_dir,
    tiny_deepseek_v4,
    tiny_gemma,
    tiny_llama,
    tiny_qwen3,
    tiny_qwen3_moe,
    tiny_tokenizer,
    write_chats,
)

FAMILIES = [tiny_llama, tiny_qwen3, tiny_qwen3_moe, tiny_gemma, tiny_deepseek_v4]
EVERY_LAYER = ("--target-layer-ids", -1, 0, 1, 2, 3)


@pytest.fixture(scope="module")
def few_chats(tmp_path_factory):
    return write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl", 7, seed=3)


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda build: build.__name__.removeprefix("tiny_"))
def target(request, tmp_path_factory):
    return save_target_dir(tmp_path_factory.mktemp("targets") / "target", request.param())


def load(directory, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_every_layer_is_bit_equal_to_a_direct_forward(target, few_chats, tmp_path, dtype):
    cache = ds.open_cache(precompute(target, few_chats, tmp_path / "store", *EVERY_LAYER, "--dtype", dtype))
    assert cache.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert differing_samples(load(target), cache, pad_token_id=0) == []


def test_a_bf16_target_is_bit_equal_too(tmp_path, few_chats):
    target = save_target_dir(tmp_path / "target", tiny_qwen3())
    flags = (*EVERY_LAYER, "--dtype", "bf16", "--compute-dtype", "bf16")
    cache = ds.open_cache(precompute(target, few_chats, tmp_path / "store", *flags))
    assert differing_samples(load(target, torch.bfloat16), cache, pad_token_id=0) == []


def test_the_comparison_sees_one_flipped_bit(tmp_path, few_chats):
    target = save_target_dir(tmp_path / "target", tiny_llama())
    cache = ds.open_cache(precompute(target, few_chats, tmp_path / "store", *EVERY_LAYER))
    model = load(target)
    end_of_turn = tiny_tokenizer().convert_tokens_to_ids("<|end|>")
    model.state_dict()["model.embed_tokens.weight"][end_of_turn].view(torch.int32)[0] ^= 1
    assert differing_samples(model, cache, pad_token_id=0) == list(range(len(cache)))
