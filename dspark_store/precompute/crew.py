"""The ranks that run one batch together, and what they have to agree on: the next shard, its commit, the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from dspark_store.format.schema import StateObject, StoreSchema
from dspark_store.precompute.ranks import World
from dspark_store.target.parallel import ParallelPlan
from dspark_store.writers.states import FinishedObjects

_NONE_LEFT = -1


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """The process groups, on the CPU, in which ranks agree: those of a crew, and those that must step together."""

    crew: dist.ProcessGroup | None
    lockstep: dist.ProcessGroup | None


def open_control_groups(plan: ParallelPlan) -> ControlGroups:
    """Make the groups; every rank of the default group must call it."""
    crews = [plan.crew(first) for first in range(0, plan.world_size, plan.crew_size)]
    replicas = [plan.lockstep(first) for first in range(0, plan.world_size, plan.replica_size)]
    return ControlGroups(
        _own_group(crews) if plan.crew_size > 1 else None, _own_group(replicas) if plan.fsdp > 1 else None
    )


def _own_group(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    own, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups], backend="gloo")
    return cast(dist.ProcessGroup, own)


class Crew:
    """One rank's part in its crew.

    ``shards`` are the ones to capture, the same list on every rank; crews take the next one from a counter that all of
    them share. The first rank of a crew leads: it takes the shards, and publishes what all of them have written.
    """

    def __init__(
        self, world: World, plan: ParallelPlan, control: ControlGroups, schema: StoreSchema, shards: Sequence[int]
    ) -> None:
        self._world = world
        self._plan = plan
        self._control = control
        self._schema = schema
        self._shards = shards
        self._leader = plan.leader(world.rank)
        self.leads = self._leader == world.rank

    def next_shard(self) -> int | None:
        """Return the next shard to capture; None when all are taken."""
        shard = _NONE_LEFT
        if self.leads:
            position = self._world.keys.add("next", 1) - 1
            shard = self._shards[position] if position < len(self._shards) else _NONE_LEFT
        if self._control.crew is not None:
            value = torch.tensor([shard])
            dist.broadcast(value, self._leader, group=self._control.crew)
            shard = int(value)
        return None if shard == _NONE_LEFT else shard

    def any_works(self, *, works: bool) -> bool:
        """Return whether any of the ranks that must make as many forwards as this one has a shard to work on."""
        if self._control.lockstep is None:
            return works
        value = torch.tensor([int(works)])
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self._control.lockstep)
        return bool(value)

    @property
    def alone(self) -> bool:
        """Whether the job has no other rank."""
        return self._world.size == 1

    def commit(
        self,
        shard: int,
        own: FinishedObjects | None,
        publish: Callable[[Sequence[FinishedObjects]], None],
        check: Callable[[], None],
    ) -> None:
        """Bring together what the crew has written of a shard; its leader then publishes.

        ``own`` is this rank's part, None for a rank that writes nothing, as may a stage none of whose layers are kept.
        ``check`` is asked while other parts are waited for, and may raise to stop. No collective is run here: another
        thread runs those of the forwards meanwhile.
        """
        if not self.leads:
            if self._plan.writes(self._world.rank):
                part = FinishedObjects({}, 0, ()) if own is None else own
                self._world.keys.set(_part_key(shard, self._world.rank), part.to_json())
            return
        parts = [] if own is None else [own]
        others = (rank for rank in self._plan.crew(self._leader) if rank != self._leader and self._plan.writes(rank))
        parts.extend(FinishedObjects.from_json(self._part(shard, rank, check), self._schema) for rank in others)
        publish(parts)

    def _part(self, shard: int, rank: int, check: Callable[[], None]) -> str:
        def ready() -> str | None:
            check()
            return self._world.keys.get(_part_key(shard, rank))

        return self._world.wait_for(ready)


def _part_key(shard: int, rank: int) -> str:
    return f"part/{shard}/{rank}"


def own_objects(schema: StoreSchema, plan: ParallelPlan, rank: int, num_layers: int) -> list[StateObject]:
    """Return the objects of a shard that a rank writes: all, those of its pipeline stage, or none.

    The embedding belongs to the first stage, the target's last layer and the last hidden states to the last one.
    """
    if not plan.writes(rank):
        return []
    stage = plan.place(rank).stage
    layers = plan.stage_layers(num_layers, stage)
    own = [item for item in schema.state_objects[:-1] if max(0, item.layer_id or 0) in layers]
    return [*own, schema.state_objects[-1]] if stage == plan.pp - 1 else own
