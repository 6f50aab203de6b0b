import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dspark_store.target.fsdp import sharded_dimension
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
)

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("fsdp")
    tiny.save_tiny(tiny.tiny_qwen3(**DIVISIBLE), directory / "untied")
    tiny.save_tiny(tiny.tiny_gemma(**DIVISIBLE), directory / "tied")
    tiny.save_tiny(tiny.tiny_qwen3_moe(num_experts=4), directory / "experts")
    tiny.save_tiny(tiny.tiny_kimi_linear(), directory / "converted")
    return directory


@pytest.fixture(scope="module")
def two_ranks(directory):
    plan = ParallelPlan(2, fsdp=2)
    cases = {
        "untied": Case(directory / "untied", plan, poison=True),
        "untied in bf16": Case(directory / "untied", plan, BF16),
        "tied": Case(directory / "tied", plan, BF16, poison=True),
        "experts": Case(directory / "experts", plan),
        "converted": Case(directory / "converted", plan),
        "cut": Case(directory / "untied", plan, num_layers=2),
    }
    return cases, dict(zip(cases, zip(*run_ranks(2, hold_all, list(cases.values())), strict=True), strict=True))


@pytest.mark.parametrize("name", ["untied", "untied in bf16", "tied", "experts", "converted", "cut"])
def test_states_and_tables_on_two_ranks_are_those_of_one_process(two_ranks, name):
    cases, held = two_ranks
    whole = expected(cases[name])
    assert all(is_equal(part, whole) for part in held[name])
    assert has_vocabulary_of(held[name][0], whole)
    assert held[name][1].vocabulary is None


def test_each_rank_holds_half_of_every_weight(two_ranks):
    cases, held = two_ranks
    whole = expected(cases["untied"])
    assert [part.parameter_bytes for part in held["untied"]] == [whole.parameter_bytes // 2] * 2
    assert held["untied"][0].shapes["model.layers.0.mlp.up_proj.weight"] == (48, 96)
    assert held["untied"][0].shapes["model.embed_tokens.weight"] == (144, 96)
    assert held["untied"][0].shapes["lm_head.weight"] == (144, 96)


def test_a_tied_head_is_held_once(two_ranks):
    cases, held = two_ranks
    assert [part.parameter_bytes for part in held["tied"]] == [expected(cases["tied"]).parameter_bytes // 2] * 2


def test_buffers_of_no_checkpoint_are_made_anew_in_float32(two_ranks):
    cases, held = two_ranks
    buffers = expected(cases["tied"]).buffers
    assert any(name.endswith("original_inv_freq") for name in buffers)
    for part in held["tied"]:
        assert part.buffers.keys() == buffers.keys()
        assert all(torch.equal(buffer, buffers[name]) for name, buffer in part.buffers.items())
        assert {buffer.dtype for name, buffer in part.buffers.items() if "inv_freq" in name} == {torch.float32}


def test_a_depth_cut_keeps_only_the_first_layers(two_ranks):
    _, held = two_ranks
    assert not any("layers.2." in name for name in held["cut"][0].shapes)


def test_four_ranks_hold_two_copies_and_three_share_two_experts(directory, tmp_path):
    tiny.save_tiny(tiny.tiny_qwen3_moe(num_experts=2, **DIVISIBLE), tmp_path / "few")
    copies = Case(directory / "untied", ParallelPlan(4, fsdp=2))
    whole = expected(copies)
    assert all(is_equal(part, whole) for (part,) in run_ranks(4, hold_all, [copies]))
    few = Case(tmp_path / "few", ParallelPlan(3, fsdp=3))
    whole = expected(few)
    parts = [part for (part,) in run_ranks(3, hold_all, [few])]
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
