import time
from pathlib import Path

import pytest
import torch

from dspark_store.target.axes import open_shard_groups
from dspark_store.target.parallel import ParallelPlan
from dspark_store.target.pipeline import OtherStagesEmbedding, TensorChannel
from tests import tiny
from tests.target.ranks import run_ranks
from tests.target.sharded_jobs import (
    CPU,
    DIVISIBLE,
    Case,
    batches,
    expected,
    has_vocabulary_of,
    hold_all,
    is_equal,
    load_part,
)

_BUILDERS = {
    "qwen3": lambda: tiny.tiny_qwen3(**DIVISIBLE),
    "gemma": tiny.tiny_gemma,  # a scaled embedding that is also the head, layers of two kinds
    "gemma4": lambda: tiny.tiny_gemma4(num_kv_shared_layers=0),  # the embedding goes into every layer
    "gpt2": tiny.tiny_gpt2,
    "deepseek_v4": tiny.tiny_deepseek_v4,  # four streams a token
    "kimi_linear": tiny.tiny_kimi_linear,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pipeline")
    for name, build in _BUILDERS.items():
        tiny.save_tiny(build(), directory / name)
    return directory


@pytest.fixture(scope="module")
def two_stages(directory):
    cases = {name: Case(directory / name, ParallelPlan(2, pp=2), torch.bfloat16, poison=True) for name in _BUILDERS}
    return cases, dict(zip(cases, zip(*run_ranks(2, hold_all, list(cases.values())), strict=True), strict=True))


@pytest.mark.parametrize("name", list(_BUILDERS))
def test_each_stage_gives_the_states_of_one_process_for_its_layers(two_stages, name):
    cases, held = two_stages
    first, second = held[name]
    whole = expected(cases[name])
    assert is_equal(first, whole)
    assert is_equal(second, whole)
    assert {(batch.slots, batch.last is None) for batch in first.batches} == {((0, 1, 2), True)}
    assert {(batch.slots, batch.last is None) for batch in second.batches} == {((3, 4), False)}
    assert has_vocabulary_of(first, whole)
    assert second.vocabulary is None


def test_a_stage_holds_its_own_layers_only(two_stages):
    cases, held = two_stages
    first, second = held["qwen3"]
    layers = [{name.split(".")[2] for name in part.shapes if ".layers." in name} for part in (first, second)]
    assert layers == [{"0", "1"}, {"2", "3"}]
    assert "model.embed_tokens.weight" in first.shapes
    assert "lm_head.weight" in second.shapes
    assert "model.embed_tokens.weight" not in second.shapes
    assert "lm_head.weight" not in first.shapes
    norm = 96 * 2  # bytes of the final norm, which both keep
    assert first.parameter_bytes + second.parameter_bytes == expected(cases["qwen3"]).parameter_bytes + norm


@pytest.mark.parametrize("stages", [3, 4])
def test_more_stages_than_captured_layers_still_hand_on_the_states(directory, stages):
    case = Case(directory / "qwen3", ParallelPlan(stages, pp=stages))
    parts = [part for (part,) in run_ranks(stages, hold_all, [case])]
    whole = expected(case)
    assert all(is_equal(part, whole) for part in parts)
    assert sorted(slot for part in parts for slot in part.batches[0].slots) == [0, 1, 2, 3, 4]
    assert [part.batches[0].last is not None for part in parts] == [False] * (stages - 1) + [True]


def test_a_stage_goes_on_while_the_next_one_is_late(directory, tmp_path):
    case = Case(directory / "qwen3", ParallelPlan(2, pp=2))
    run_ranks(2, _first_stage_ahead, case, tmp_path / "two batches are through")


def _first_stage_ahead(rank: int, case: Case, flag: Path) -> None:
    target = load_part(rank, case)
    capture = target.capture([0, 3])
    for _ in range(100 if rank == 1 else 0):
        if flag.exists():
            break
        time.sleep(0.05)
    else:
        if rank == 1:
            raise AssertionError("the first stage waited")
    for ids, mask in batches()[:2]:
        capture(ids, mask)
    flag.touch()
    target.finish()


def test_a_model_whose_later_layers_want_the_embedding_is_refused(directory):
    with pytest.raises(RuntimeError, match="pp does not work for model_type='qwen3', whose later layers need the emb"):
        run_ranks(2, _embedding_in_every_layer, Case(directory / "qwen3", ParallelPlan(2, pp=2)))


def _embedding_in_every_layer(rank: int, case: Case) -> None:
    target = load_part(rank, case)
    ids, mask = batches()[0]
    for layer in target.model.model.layers:
        layer.register_forward_hook(lambda _layer, _args, output: output + target.model.model.embed_tokens(ids))
    target.capture([0, 3])(ids, mask)
    target.finish()


def test_the_embedding_of_a_later_stage_gives_nothing_that_could_pass_for_a_state():
    states = OtherStagesEmbedding(torch.nn.Embedding(5, 3, dtype=torch.bfloat16))(torch.zeros(2, 4, dtype=torch.int64))
    assert states.shape == (2, 4, 3)
    assert states.dtype == torch.bfloat16
    assert states.isnan().all()


def test_a_message_out_of_turn_is_refused():
    with pytest.raises(RuntimeError, match="rank 0 sent message 0 where 1 was due"):
        run_ranks(2, _out_of_turn)


def _out_of_turn(rank: int) -> None:
    groups = open_shard_groups(ParallelPlan(2, pp=2), CPU)
    assert groups is not None
    channel = TensorChannel(1 - rank, groups.get_group("pp"), CPU)
    if rank == 0:
        channel.send(torch.ones(2, 3))
        channel.finish()
    else:
        channel._count = 1
        channel.receive()
