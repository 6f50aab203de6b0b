"""The process groups of a plan: one device mesh over all ranks, with a dimension for each axis."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dspark_store.target.parallel import ParallelPlan

_AXES = ("replica", "fsdp", "pp", "ep", "tp")


@dataclass(frozen=True, slots=True)
class ShardGroups:
    """One process group for each axis and rank, within the default group."""

    mesh: DeviceMesh

    def axis(self, name: str) -> DeviceMesh:
        """The one-dimensional mesh of this rank along `name`: fsdp, pp, ep, tp or replica."""
        return self.mesh[name]

    def group(self, name: str) -> dist.ProcessGroup:
        """The process group of this rank along `name`."""
        return self.mesh.get_group(name)


def open_shard_groups(plan: ParallelPlan, device: torch.device) -> ShardGroups | None:
    """Make the process groups of `plan`; None when it shards nothing. A collective over the default process group.

    Raises ValueError when the default group has another number of ranks than the plan.
    """
    if not plan.sharded_axes:
        return None
    world_size = dist.get_world_size()
    if world_size != plan.world_size:
        raise ValueError(f"the plan is for {plan.world_size} processes: there are {world_size}")
    shape = (plan.replicas, plan.fsdp, plan.pp, plan.ep, plan.tp)
    return ShardGroups(init_device_mesh(device.type, shape, mesh_dim_names=_AXES))
