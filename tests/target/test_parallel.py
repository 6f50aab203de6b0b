import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PretrainedConfig

from dspark_store.target.parallel import ParallelPlan
from tests import tiny

_DEGREES = st.sampled_from(
    [{}, {"tp": 2}, {"tp": 3, "fsdp": 2}, {"ep": 4}, {"ep": 2, "fsdp": 3}, {"pp": 3}, {"fsdp": 4}]
)


@st.composite
def _plans(draw):
    degrees = draw(_DEGREES)
    size = ParallelPlan(24, **degrees).replica_size
    return ParallelPlan(size * draw(st.integers(1, 4)), **degrees)


@given(_plans())
def test_every_rank_has_a_place_of_its_own(plan):
    places = {plan.place(rank) for rank in range(plan.world_size)}
    assert len(places) == plan.world_size
    assert {place.replica for place in places} == set(range(plan.replicas))
    assert {place.fsdp_rank for place in places} == set(range(plan.fsdp))


@given(_plans())
def test_crews_and_lockstep_groups_cover_every_rank_once(plan):
    for block, size in ((plan.crew, plan.crew_size), (plan.lockstep, plan.replica_size)):
        blocks = {block(rank) for rank in range(plan.world_size)}
        assert sorted(rank for ranks in blocks for rank in ranks) == list(range(plan.world_size))
        assert {len(ranks) for ranks in blocks} == {size}
        assert all(rank in block(rank) for rank in range(plan.world_size))
    assert all(set(plan.crew(rank)) <= set(plan.lockstep(rank)) for rank in range(plan.world_size))


@given(_plans())
def test_one_rank_of_a_crew_writes_or_one_of_each_stage(plan):
    for rank in range(plan.world_size):
        writers = [member for member in plan.crew(rank) if plan.writes(member)]
        assert len(writers) == plan.pp
        assert writers[0] == plan.leader(rank)


@given(st.integers(1, 6), st.integers(6, 40))
def test_the_stages_hold_every_layer_once_and_in_order(pp, num_layers):
    plan = ParallelPlan(pp, pp=pp)
    stages = [plan.stage_layers(num_layers, stage) for stage in range(pp)]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


def test_the_tensor_parallel_rank_is_innermost_and_the_replica_outermost():
    plan = ParallelPlan(8, tp=2, fsdp=2)
    assert [(plan.place(rank).replica, plan.place(rank).fsdp_rank, plan.place(rank).tp_rank) for rank in range(8)] == [
        (replica, fsdp, tp) for replica in range(2) for fsdp in range(2) for tp in range(2)
    ]


@pytest.mark.parametrize(
    ("world_size", "degrees", "kind", "equality_class"),
    [
        (1, {}, "single", "exact"),
        (3, {}, "replicated", "exact"),
        (4, {"fsdp": 2}, "fsdp2", "exact"),
        (2, {"pp": 2}, "pp", "exact"),
        (4, {"ep": 2, "fsdp": 2}, "fsdp2+ep", "exact"),
        (2, {"tp": 2}, "tp", "tp2-compute"),
        (8, {"tp": 4, "fsdp": 2, "reduce_dtype": "fp32"}, "fsdp2+tp", "tp4-fp32"),
    ],
)
def test_a_plan_has_a_name_and_an_equality_class(world_size, degrees, kind, equality_class):
    plan = ParallelPlan(world_size, **degrees)
    assert (plan.kind, plan.equality_class) == (kind, equality_class)


@pytest.mark.parametrize(
    ("world_size", "degrees", "message"),
    [
        (4, {"tp": 0}, "tp=0 is not a degree"),
        (6, {"fsdp": 4}, "fsdp=4 needs a multiple of 4 processes: there are 6; start 4 or 8, or give sizes whose pro"),
        (
            1,
            {"tp": 2},
            "tp=2 needs a multiple of 2 processes: there are 1; start 2, or give sizes whose product divides",
        ),
        (4, {"tp": 2, "ep": 2}, "ep=2 tp=2 cannot be combined"),
        (4, {"pp": 2, "fsdp": 2}, "fsdp=2 pp=2 cannot be combined"),
        (2, {"tp": 2, "reduce_dtype": "bf16"}, "reduce_dtype='bf16' is unknown"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_name(world_size, degrees, message):
    with pytest.raises(ValueError, match=message):
        ParallelPlan(world_size, **degrees)


@pytest.mark.parametrize(
    ("build", "degrees", "options", "message"),
    [
        (tiny.tiny_qwen3, {"tp": 3}, {}, "tp=3 does not divide the target's num_attention_heads=4"),
        (tiny.tiny_qwen3, {"tp": 4}, {}, "tp=4 does not divide the target's num_key_value_heads=2"),
        (tiny.tiny_gpt2, {"tp": 2}, {}, "tp=2 is not possible: .* no tensor parallel plan .*'gpt2'"),
        (tiny.tiny_qwen3, {"ep": 2}, {}, "ep=2 is not possible: .* no expert parallel plan .*'qwen3'"),
        (tiny.tiny_qwen3_moe, {"ep": 3}, {}, "ep=3 does not divide the target's num_experts=4"),
        (tiny.tiny_qwen3_moe, {"tp": 2, "reduce_dtype": "fp32"}, {}, "does not reach into the experts"),
        (tiny.tiny_qwen3, {"pp": 6}, {}, "pp=6 is more than the target's 4 layers"),
        (lambda: tiny.tiny_qwen3(num_hidden_layers=2), {"pp": 3}, {}, "pp=3 is more than the target's 2 layers"),
        (tiny.tiny_gemma4, {"pp": 2}, {}, "pp=2 does not work for model_type='gemma4_text'"),
        (tiny.tiny_glm_moe_dsa, {"pp": 2}, {}, "pp=2 does not work for model_type='glm_moe_dsa'"),
        (tiny.tiny_llama, {"fsdp": 2}, {"gguf": True}, "fsdp=2 does not work with a GGUF file"),
    ],
)
def test_a_target_that_cannot_be_shared_out_so_is_refused_by_axis(build, degrees, options, message):
    config: PretrainedConfig = build().config
    with pytest.raises(ValueError, match=message):
        ParallelPlan(12, **degrees).check(config, **options)


def test_a_target_that_can_be_shared_out_is_not_refused():
    ParallelPlan(4, tp=2, fsdp=2).check(tiny.tiny_qwen3().config)
    ParallelPlan(4, ep=4).check(tiny.tiny_qwen3_moe().config)
    ParallelPlan(4, pp=4).check(tiny.tiny_deepseek_v4().config)
    ParallelPlan(3).check(tiny.tiny_gpt2().config, gguf=True)
