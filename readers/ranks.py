"""Which data-parallel rank this process is."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def resolve_ranks(dp_rank: int | None, dp_size: int | None, mesh: DeviceMesh | None) -> tuple[int, int]:
    """Return (rank, size): as given; else of a one-dimensional device mesh; else of the default process group, if any.

    ValueError when only one of the two is given, the rank is outside the size, or the mesh has several dimensions.
    """
    if (dp_rank is None) != (dp_size is None):
        raise ValueError(f"give dp_rank and dp_size together, got {dp_rank} and {dp_size}")
    if dp_rank is not None and dp_size is not None:
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank {dp_rank} is outside the {dp_size} ranks")
        return dp_rank, dp_size
    if mesh is not None:
        if mesh.ndim != 1:
            raise ValueError(f"the mesh has dimensions {mesh.mesh_dim_names}: give the data-parallel one, mesh['dp']")
        return mesh.get_local_rank(), mesh.size()
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
