import pytest
import torch

from dspark_store.target.parallel import ParallelPlan
from tests import tiny
from tests.target.ranks import run_ranks
from tests.target.sharded_jobs import (
    DIVISIBLE,
    Case,
    expected,
    has_vocabulary_of,
    hold_all,
    load_part,
    pairs,
)

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tensor-parallel")
    tiny.save_tiny(tiny.tiny_qwen3(**DIVISIBLE), directory / "untied")
    tiny.save_tiny(tiny.tiny_gemma(**DIVISIBLE), directory / "tied")
    tiny.save_tiny(tiny.tiny_qwen3_moe(**DIVISIBLE), directory / "experts")
    biased = tiny.tiny_llama(**DIVISIBLE, attention_bias=True, mlp_bias=True)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in biased.named_parameters():
        if name.endswith("bias"):
            parameter.data = torch.randn(parameter.shape, generator=generator)
    tiny.save_tiny(biased, directory / "biased")
    return directory


def _cases(directory, size):
    plan, fp32 = ParallelPlan(size, tp=size), ParallelPlan(size, tp=size, reduce_dtype="fp32")
    gather = ParallelPlan(size, tp=size, reduce_dtype="gather")
    return {
        "untied": Case(directory / "untied", plan),
        "biased": Case(directory / "biased", plan),
        "biased, summed in fp32": Case(directory / "biased", fp32, BF16),
        "untied, summed in fp32": Case(directory / "untied", fp32, BF16),
        "untied, gathered": Case(directory / "untied", gather, BF16),
        "biased, gathered": Case(directory / "biased", gather, BF16),
        "tied": Case(directory / "tied", plan),
        **({} if size == 3 else {"experts": Case(directory / "experts", plan)}),
    }


@pytest.fixture(scope="module", params=[2, 3, 4])
def held(request, directory):
    cases = _cases(directory, request.param)
    parts = zip(*run_ranks(request.param, hold_all, list(cases.values())), strict=True)
    return {name: (expected(case), part) for (name, case), part in zip(cases.items(), parts, strict=True)}


def test_fp32_states_are_within_1e_5_and_alike_on_all_ranks(held):
    for name in held.keys() & {"untied", "biased", "tied", "experts"}:
        whole, parts = held[name]
        for part in parts:
            for mine, theirs in pairs(part, whole):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
            assert all(
                torch.equal(mine, first)
                for (mine, _), (first, _) in zip(pairs(part, whole), pairs(parts[0], whole), strict=True)
            )


def test_with_fp32_partial_products_999_of_1000_bf16_elements_of_a_layer_are_those_of_one_process(held):
    for name in ("untied, summed in fp32", "biased, summed in fp32"):
        whole, (part, *_) = held[name]
        assert _share_alike(pairs(part, whole)[1::6]) >= 0.999  # of the first layer
        assert _share_alike(pairs(part, whole)) >= 0.99  # further layers see the elements that differ


def test_with_gathered_inputs_999_of_1000_bf16_elements_are_those_of_one_process_at_any_depth(held):
    for name in ("untied, gathered", "biased, gathered"):
        whole, parts = held[name]
        assert all(_share_alike(pairs(part, whole)) >= 0.999 for part in parts)
        assert parts[0].shapes["model.layers.0.mlp.down_proj.weight"] == (96 // len(parts), 96)


def _share_alike(states):
    return sum(int((mine == theirs).sum()) for mine, theirs in states) / sum(mine.numel() for mine, _ in states)


def test_each_rank_holds_its_heads_and_features(held):
    whole, parts = held["untied"]
    size = len(parts)
    for part in parts:
        assert part.shapes["model.layers.0.self_attn.q_proj.weight"] == (96 // size, 96)
        assert part.shapes["model.layers.0.self_attn.o_proj.weight"] == (96, 96 // size)
        assert part.shapes["model.layers.0.mlp.down_proj.weight"] == (96, 96 // size)
        assert part.shapes["model.embed_tokens.weight"] == (288 // size, 96)
        assert part.shapes["lm_head.weight"] == (288 // size, 96)
        assert part.parameter_bytes < whole.parameter_bytes / size * 1.05  # norms are on every rank


def test_the_vocabulary_tables_come_back_whole(held):
    for whole, parts in held.values():
        assert has_vocabulary_of(parts[0], whole)
        assert all(part.vocabulary is None for part in parts[1:])


def test_tensor_parallel_within_fsdp_is_within_1e_5(directory):
    case = Case(directory / "untied", ParallelPlan(4, tp=2, fsdp=2))
    whole = expected(case)
    for (part,) in run_ranks(4, hold_all, [case]):
        for mine, theirs in pairs(part, whole):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        assert part.shapes["model.layers.0.mlp.up_proj.weight"] == (24, 96)


def test_features_that_do_not_divide_are_refused_by_name(tmp_path):
    tiny.save_tiny(tiny.tiny_qwen3(**{**DIVISIBLE, "intermediate_size": 64}), tmp_path)
    with pytest.raises(RuntimeError, match=r"tp=3 does not divide the 64 features of layers\.0\.mlp\.gate_proj"):
        run_ranks(3, load_part, Case(tmp_path, ParallelPlan(3, tp=3)))
