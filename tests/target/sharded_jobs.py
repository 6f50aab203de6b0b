"""What the processes of the sharding tests do: load a part of a target, capture three batches, tell what they hold."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dspark_store.target.axes import open_shard_groups
from dspark_store.target.capture import StageStates, TargetCapture, find_base_model
from dspark_store.target.facts import VocabularyWeights
from dspark_store.target.load import load_target
from dspark_store.target.parallel import ParallelPlan
from dspark_store.target.sharded import ShardedTarget, load_sharded_target
from dspark_store.target.source import TargetSource

CPU = torch.device("cpu")
DIVISIBLE = {  # by 1, 2, 3 and 4
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "hidden_size": 96,
    "intermediate_size": 96,
}


@dataclass
class Case:
    """One target and plan; `poison` fills memory with NaN before it is used."""

    path: Path
    plan: ParallelPlan
    dtype: torch.dtype = torch.float32
    num_layers: int | None = None
    poison: bool = False


@dataclass
class Held:
    """What one rank captured and holds."""

    batches: list[StageStates]
    parameter_bytes: int
    shapes: dict[str, tuple[int, ...]]
    vocabulary: VocabularyWeights | None
    buffers: dict[str, Tensor] = field(default_factory=dict)


def batches() -> list[tuple[Tensor, Tensor]]:
    """Three batches of different shapes, two with padded rows."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for rows, length in ((2, 13), (3, 40), (1, 5)):
        ids = torch.randint(8, 200, (rows, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[1:, length // 2 :] = 0
        made.append((ids, mask))
    return made


def layer_ids(num_layers: int) -> list[int]:
    return sorted({-1, 0, 1, num_layers - 2, num_layers - 1})


def load_part(rank: int, case: Case) -> ShardedTarget:
    return load_sharded_target(
        TargetSource(str(case.path)),
        case.plan,
        rank,
        dtype=case.dtype,
        device=CPU,
        groups=open_shard_groups(case.plan, CPU),
        num_layers=case.num_layers,
    )


def hold_all(rank: int, cases: Sequence[Case]) -> list[Held]:
    return [_hold(rank, case) for case in cases]


def expected(case: Case) -> Held:
    """The same from one process and `TargetCapture`."""
    torch.set_num_threads(1)
    model = load_target(TargetSource(str(case.path)), dtype=case.dtype, device=CPU, num_layers=case.num_layers)
    capture = TargetCapture(model, layer_ids(len(find_base_model(model)[1])))
    whole: list[StageStates] = [capture(ids, mask) for ids, mask in batches()]
    target = ShardedTarget(model, ParallelPlan(1), 0)
    return Held(whole, parameter_bytes(model), {}, target.weights(), dict(model.named_buffers()))


def _hold(rank: int, case: Case) -> Held:
    torch.use_deterministic_algorithms(case.poison, warn_only=True)  # memory that nobody wrote is then NaN
    target = load_part(rank, case)
    torch.use_deterministic_algorithms(False)
    capture = target.capture(layer_ids(len(find_base_model(target.model)[1])))
    states = [capture(ids, mask) for ids, mask in batches()]
    target.finish()
    shapes = {name: _local_shape(parameter) for name, parameter in target.model.named_parameters()}
    buffers = dict(target.model.named_buffers())
    return Held(states, parameter_bytes(target.model), shapes, target.weights(), buffers)


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of the parameters that this rank keeps between forwards, a tied one counted once."""
    return sum(_local(parameter).nbytes for parameter in model.parameters())


def _local_shape(parameter: Tensor) -> tuple[int, ...]:
    return tuple(_local(parameter).shape)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def pairs(held: Held, whole: Held) -> list[tuple[Tensor, Tensor]]:
    """Each state that a rank holds beside that of one process."""
    found = []
    for mine, all_of_them in zip(held.batches, whole.batches, strict=True):
        found += [(state, all_of_them.layers[slot]) for slot, state in zip(mine.slots, mine.layers, strict=True)]
        found += [] if mine.last is None or all_of_them.last is None else [(mine.last, all_of_them.last)]
    return found


def is_equal(held: Held, whole: Held) -> bool:
    """Whether every state that a rank holds is a plain tensor, equal bit by bit to that of one process."""
    return all(
        type(mine) is Tensor and mine.dtype == theirs.dtype and torch.equal(mine, theirs)
        for mine, theirs in pairs(held, whole)
    )


def has_vocabulary_of(held: Held, whole: Held) -> bool:
    mine, theirs = held.vocabulary, whole.vocabulary
    if mine is None or theirs is None:
        return False
    return (
        torch.equal(mine.embedding, theirs.embedding)
        and torch.equal(mine.head, theirs.head)
        and mine.facts == theirs.facts
        and (mine.head is mine.embedding) == bool(theirs.facts["tied"])
    )
