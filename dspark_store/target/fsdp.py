"""FSDP2: each rank holds a slice of every weight, and gathers a layer's weights just before it runs that layer."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from dspark_store.target.capture import find_base_model


def shard_fully(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Share every weight of the base model out over `mesh`, a group for each decoder layer and one for the rest.

    The base model is the root, because capture calls it and not the model around it, so that the head stays as it is.
    """
    base, layers = find_base_model(model)

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(sharded_dimension(parameter, mesh.size()))

    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, shard_placement_fn=placement)
    fully_shard(base, mesh=mesh, reshard_after_forward=True, shard_placement_fn=placement)


def sharded_dimension(parameter: nn.Parameter, size: int) -> int:
    """The dimension to cut into `size` slices: the first, unless a rank would get none of it and another divides.

    Experts stacked into one parameter are often fewer than the ranks, and transformers cannot load an empty slice.
    """
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    rows = local.shape[0] if local.dim() else 0
    if -(-rows // size) * (size - 1) < rows:
        return 0
    taken = {place.dim % local.dim() for place in getattr(parameter, "placements", ()) if isinstance(place, Shard)}
    even = [index for index in range(1, local.dim()) if local.shape[index] % size == 0 and index not in taken]
    return even[-1] if even else 0
