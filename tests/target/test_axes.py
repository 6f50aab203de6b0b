from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dspark_store.target.axes import add_by_expert, sharded_dimension
from dspark_store.target.parallel import ParallelPlan
from tests import tiny
from tests.target.ranks import run_ranks
from tests.target.sharded_jobs import (
    DIVISIBLE,
    Case,
    expected,
    has_vocabulary_of,
    hold_all,
    is_equal,
    load_part,
    pairs,
)

BF16 = torch.bfloat16
EXPERTS = {"num_experts": 12, "num_experts_per_tok": 4}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("axes")
    biased = tiny.tiny_llama(**DIVISIBLE, attention_bias=True, mlp_bias=True)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in biased.named_parameters():
        if name.endswith("bias"):
            parameter.data = torch.randn(parameter.shape, generator=generator)
    targets = {
        "untied": tiny.tiny_qwen3(**DIVISIBLE),
        "tied": tiny.tiny_gemma(**DIVISIBLE),
        "biased": biased,
        "converted": tiny.tiny_kimi_linear(),
        "two experts": tiny.tiny_qwen3_moe(num_experts=2, **DIVISIBLE),
        "four experts": tiny.tiny_qwen3_moe(num_experts=4, **DIVISIBLE),
        "twelve experts": tiny.tiny_qwen3_moe(**DIVISIBLE, **EXPERTS),
        "deepseek_v4": tiny.tiny_deepseek_v4(n_routed_experts=12, num_experts_per_tok=3),
    }
    for name, target in targets.items():
        tiny.save_tiny(target, directory / name)
    return directory


def cases_of(size, directory):
    """All cases of a number of ranks, which one run captures."""
    fsdp, ep = ParallelPlan(size, fsdp=size), ParallelPlan(size, ep=size)
    tp, fp32, gather = (ParallelPlan(size, tp=size, reduce_dtype=how) for how in ("compute", "fp32", "gather"))
    untied, tied, biased, few, experts, deepseek = (
        directory / name for name in ("untied", "tied", "biased", "two experts", "twelve experts", "deepseek_v4")
    )
    first, second = (BF16, torch.float32) if size == 3 else (torch.float32, BF16)
    by_experts = {"ep experts": Case(experts, ep, first), "ep deepseek": Case(deepseek, ep, second)}
    if size == 4:
        return {
            **by_experts,
            "fsdp copies": Case(untied, ParallelPlan(4, fsdp=2)),
            "fsdp of ep": Case(experts, ParallelPlan(4, ep=2, fsdp=2)),
            "fsdp of tp": Case(untied, ParallelPlan(4, tp=2, fsdp=2)),
        }
    by_tensors = {
        "tp untied": Case(untied, tp),
        "tp biased": Case(biased, tp),
        "tp tied": Case(tied, tp),
        "tp biased, summed in fp32": Case(biased, fp32, BF16),
        "tp untied, summed in fp32": Case(untied, fp32, BF16),
        "tp untied, gathered": Case(untied, gather, BF16),
        "tp biased, gathered": Case(biased, gather, BF16),
    }
    if size == 3:
        return {**by_experts, **by_tensors, "fsdp few experts": Case(few, fsdp)}
    return {
        **by_experts,
        **by_tensors,
        "tp experts": Case(directory / "four experts", tp),
        "fsdp untied": Case(untied, fsdp, poison=True),
        "fsdp untied in bf16": Case(untied, fsdp, BF16),
        "fsdp tied": Case(tied, fsdp, BF16, poison=True),
        "fsdp experts": Case(directory / "four experts", fsdp),
        "fsdp converted": Case(directory / "converted", fsdp),
        "fsdp cut": Case(untied, fsdp, num_layers=2),
    }


@pytest.fixture(scope="module")
def held(directory):
    """By size, then by case: what one process captured and holds, and what each of the ranks did."""

    @cache
    def of(size):
        cases = cases_of(size, directory)
        parts = zip(*run_ranks(size, hold_all, list(cases.values()), seconds=200), strict=True)
        return {name: (expected(case), part) for (name, case), part in zip(cases.items(), parts, strict=True)}

    return of


def named(held, size, axis):
    return {name: each for name, each in held(size).items() if name.startswith(axis)}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_states_are_those_of_one_process_and_each_rank_holds_whole_experts(held, size):
    for whole, parts in named(held, size, "ep").values():
        assert all(is_equal(part, whole) for part in parts)
        assert has_vocabulary_of(parts[0], whole)
        shapes: dict[str, tuple[int, ...]] = {}
        for part in parts:
            shapes = {name: shape for name, shape in part.shapes.items() if ".experts." in name}
            assert {shape[0] for shape in shapes.values()} == {12 // size}
            assert len(shapes) == 8
        state = whole.batches[0].layers[0]
        experts = sum(torch.Size(shape).numel() for shape in shapes.values()) * state.element_size()
        head = (size - 1) * (288 // size) * state.shape[-1] * state.element_size()
        assert parts[0].parameter_bytes == whole.parameter_bytes - (size - 1) * experts - head


def test_experts_are_shared_out_further_by_fsdp(held):
    whole, parts = held(4)["fsdp of ep"]
    for part in parts:
        assert is_equal(part, whole)
        assert part.shapes["model.layers.0.mlp.experts.down_proj"] == (3, 96, 32)
        assert part.shapes["model.layers.0.self_attn.q_proj.weight"] == (48, 96)


def test_outputs_are_added_in_the_order_of_the_experts():
    generator = torch.Generator().manual_seed(0)
    weighted = torch.randn(50, 4, 8, generator=generator).to(BF16)
    chosen = torch.stack([torch.randperm(12, generator=generator)[:4] for _ in range(50)])
    total = torch.zeros(50, 8, dtype=BF16)
    for expert in range(12):  # as transformers' own loop does
        token, slot = torch.where(chosen == expert)
        total.index_add_(0, token, weighted[token, slot])
    assert torch.equal(add_by_expert(weighted, chosen), total)


def test_states_and_tables_on_two_ranks_are_those_of_one_process(held):
    found = named(held, 2, "fsdp")
    assert len(found) == 6
    for name, (whole, parts) in found.items():
        assert all(is_equal(part, whole) for part in parts), name
        assert has_vocabulary_of(parts[0], whole), name
        assert parts[1].vocabulary is None


def test_each_rank_holds_half_of_every_weight(held):
    whole, parts = held(2)["fsdp untied"]
    assert [part.parameter_bytes for part in parts] == [whole.parameter_bytes // 2] * 2
    assert parts[0].shapes["model.layers.0.mlp.up_proj.weight"] == (48, 96)
    assert parts[0].shapes["model.embed_tokens.weight"] == (144, 96)
    assert parts[0].shapes["lm_head.weight"] == (144, 96)


def test_a_tied_head_is_held_once(held):
    whole, parts = held(2)["fsdp tied"]
    assert [part.parameter_bytes for part in parts] == [whole.parameter_bytes // 2] * 2


def test_buffers_of_no_checkpoint_are_made_anew_in_float32(held):
    whole, parts = held(2)["fsdp tied"]
    assert any(name.endswith("original_inv_freq") for name in whole.buffers)
    for part in parts:
        assert part.buffers.keys() == whole.buffers.keys()
        assert all(torch.equal(buffer, whole.buffers[name]) for name, buffer in part.buffers.items())
        assert {buffer.dtype for name, buffer in part.buffers.items() if "inv_freq" in name} == {torch.float32}


def test_a_depth_cut_keeps_only_the_first_layers(held):
    _, parts = held(2)["fsdp cut"]
    assert not any("layers.2." in name for name in parts[0].shapes)


def test_four_ranks_hold_two_copies_and_three_share_two_experts(held):
    whole, parts = held(4)["fsdp copies"]
    assert all(is_equal(part, whole) for part in parts)
    whole, parts = held(3)["fsdp few experts"]
    assert all(is_equal(part, whole) for part in parts)
    assert parts[2].shapes["model.layers.0.mlp.experts.down_proj"] == (2, 32, 32)


@pytest.mark.parametrize(
    ("shape", "size", "dimension"),
    [((8, 6), 4, 0), ((3, 6), 2, 0), ((4, 6, 9), 3, 2), ((2, 6, 9), 3, 2), ((2, 5), 3, 0)],
)
def test_the_first_dimension_is_cut_unless_a_rank_would_get_nothing(shape, size, dimension):
    assert sharded_dimension(nn.Parameter(torch.empty(shape)), size) == dimension


def test_a_checkpoint_that_lacks_a_weight_is_refused_by_its_name(directory, tmp_path):
    tensors = load_file(directory / "untied" / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tiny.tiny_qwen3(**DIVISIBLE).config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        run_ranks(2, load_part, Case(tmp_path, ParallelPlan(2, fsdp=2)))


@pytest.mark.parametrize("size", [2, 3])
def test_fp32_states_are_within_1e_5_and_alike_on_all_ranks(held, size):
    found = named(held, size, "tp")
    for name in found.keys() & {"tp untied", "tp biased", "tp tied", "tp experts"}:
        whole, parts = found[name]
        for part in parts:
            for mine, theirs in pairs(part, whole):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
            assert all(
                torch.equal(mine, first)
                for (mine, _), (first, _) in zip(pairs(part, whole), pairs(parts[0], whole), strict=True)
            )


@pytest.mark.parametrize("size", [2, 3])
def test_with_fp32_partial_products_999_of_1000_bf16_elements_of_a_layer_are_those_of_one_process(held, size):
    for name in ("tp untied, summed in fp32", "tp biased, summed in fp32"):
        whole, (part, *_) = held(size)[name]
        assert _share_alike(pairs(part, whole)[1::6]) >= 0.999  # of the first layer
        assert _share_alike(pairs(part, whole)) >= 0.99  # further layers see the elements that differ


@pytest.mark.parametrize("size", [2, 3])
def test_with_gathered_inputs_999_of_1000_bf16_elements_are_those_of_one_process_at_any_depth(held, size):
    for name in ("tp untied, gathered", "tp biased, gathered"):
        whole, parts = held(size)[name]
        assert all(_share_alike(pairs(part, whole)) >= 0.999 for part in parts)
        assert parts[0].shapes["model.layers.0.mlp.down_proj.weight"] == (96 // size, 96)


def _share_alike(states):
    return sum(int((mine == theirs).sum()) for mine, theirs in states) / sum(mine.numel() for mine, _ in states)


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_holds_its_heads_and_features(held, size):
    whole, parts = held(size)["tp untied"]
    for part in parts:
        assert part.shapes["model.layers.0.self_attn.q_proj.weight"] == (96 // size, 96)
        assert part.shapes["model.layers.0.self_attn.o_proj.weight"] == (96, 96 // size)
        assert part.shapes["model.layers.0.mlp.down_proj.weight"] == (96, 96 // size)
        assert part.shapes["model.embed_tokens.weight"] == (288 // size, 96)
        assert part.shapes["lm_head.weight"] == (288 // size, 96)
        assert part.parameter_bytes < whole.parameter_bytes / size * 1.05  # norms are on every rank


@pytest.mark.parametrize("size", [2, 3])
def test_the_vocabulary_tables_come_back_whole(held, size):
    for whole, parts in named(held, size, "tp").values():
        assert has_vocabulary_of(parts[0], whole)
        assert all(part.vocabulary is None for part in parts[1:])


def test_tensor_parallel_within_fsdp_is_within_1e_5(held):
    whole, parts = held(4)["fsdp of tp"]
    for part in parts:
        for mine, theirs in pairs(part, whole):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        assert part.shapes["model.layers.0.mlp.up_proj.weight"] == (24, 96)


def test_features_that_do_not_divide_are_refused_by_name(tmp_path):
    tiny.save_tiny(tiny.tiny_qwen3(**{**DIVISIBLE, "intermediate_size": 64}), tmp_path)
    with pytest.raises(RuntimeError, match=r"tp=3 does not divide the 64 features of layers\.0\.mlp\.gate_proj"):
        run_ranks(3, load_part, Case(tmp_path, ParallelPlan(3, tp=3)))
