import pytest
import torch

from dspark_store.target.expert_parallel import add_by_expert
from dspark_store.target.parallel import ParallelPlan
from tests import tiny
from tests.target.ranks import run_ranks
from tests.target.sharded_jobs import DIVISIBLE, Case, expected, has_vocabulary_of, hold_all, is_equal

BF16 = torch.bfloat16
EXPERTS = {"num_experts": 12, "num_experts_per_tok": 4}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("expert-parallel")
    tiny.save_tiny(tiny.tiny_qwen3_moe(**DIVISIBLE, **EXPERTS), directory / "qwen3_moe")
    tiny.save_tiny(tiny.tiny_deepseek_v4(n_routed_experts=12, num_experts_per_tok=3), directory / "deepseek_v4")
    return directory


@pytest.mark.parametrize("size", [2, 3, 4])
def test_states_are_those_of_one_process_and_each_rank_holds_whole_experts(directory, size):
    plan = ParallelPlan(size, ep=size)
    cases = [
        Case(directory / name, plan, dtype) for name in ("qwen3_moe", "deepseek_v4") for dtype in (torch.float32, BF16)
    ]
    for case, parts in zip(cases, zip(*run_ranks(size, hold_all, cases), strict=True), strict=True):
        whole = expected(case)
        assert all(is_equal(part, whole) for part in parts)
        assert has_vocabulary_of(parts[0], whole)
        shapes: dict[str, tuple[int, ...]] = {}
        for part in parts:
            shapes = {name: shape for name, shape in part.shapes.items() if ".experts." in name}
            assert {shape[0] for shape in shapes.values()} == {12 // size}
            assert len(shapes) == 8
        experts = sum(torch.Size(shape).numel() for shape in shapes.values()) * case.dtype.itemsize
        head = (size - 1) * (288 // size) * whole.batches[0].layers[0].shape[-1] * case.dtype.itemsize
        assert parts[0].parameter_bytes == whole.parameter_bytes - (size - 1) * experts - head


def test_experts_are_shared_out_further_by_fsdp(directory):
    case = Case(directory / "qwen3_moe", ParallelPlan(4, ep=2, fsdp=2))
    whole = expected(case)
    for (part,) in run_ranks(4, hold_all, [case]):
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
