"""Tensor parallelism by the model's own plan: every rank of a group runs one batch through its slice of each layer.

Sums over the ranks are added in another order than one device adds, so that states differ from its in the last bits.
With fp32 partial products nearly all bfloat16 elements of a layer come out the same; deeper layers see the few that do
not. Gathering in place of adding avoids the split sums, and then only a kernel that adds otherwise for another width of
its output could still differ: in bfloat16 on a CPU none did, in float32 less than 1 % of the elements.
"""

from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from dspark_store.target.capture import find_base_model
from dspark_store.target.model_plans import rules_by_name
from dspark_store.target.parallel import ReduceDtype

_SUMMED_STYLES = frozenset({"rowwise", "rowwise_rep"})


def shard_tensors(model: PreTrainedModel, mesh: DeviceMesh, reduce_dtype: ReduceDtype) -> None:
    """Share the weights of `model` out over `mesh` by its plan.

    Raises ValueError when the plan fits no module, or a slice would not be whole.
    """
    base = cast(PreTrainedModel, find_base_model(model)[0])
    rules = rules_by_name(base, base.tp_plan)
    _refuse_uneven(base, rules, mesh.size(), gather=reduce_dtype == "gather")
    summed = [name for name in rules if rules[name] in _SUMMED_STYLES and _linear(base, name) is not None]
    if reduce_dtype == "gather":
        rules |= {rule: "colwise" for name in summed for rule in rules if rule.startswith(f"{name}.")}
        rules = {rule: style for rule, style in rules.items() if rule not in summed}
    apply_tensor_parallelism(base, mesh, rules)
    for name in summed if reduce_dtype != "compute" else []:
        linear = cast(nn.Linear, _linear(base, name))
        (_add_in_fp32 if reduce_dtype == "fp32" else _gather_around)(linear, mesh)


def _refuse_uneven(base: nn.Module, rules: dict[str, str], size: int, *, gather: bool) -> None:
    if not rules:
        raise ValueError(f"tp={size} is not possible: the tensor parallel plan fits no module of the target")
    for name, style in rules.items():
        module = _linear(base, name)
        if module is not None:
            widths = [module.in_features] if style.startswith("rowwise") else []
            if style.startswith("colwise") or (widths and gather):
                widths.append(module.out_features)
            for width in (width for width in widths if width % size):
                raise ValueError(f"tp={size} does not divide the {width} features of {name}: give a tp that does")


def _linear(base: nn.Module, name: str) -> nn.Linear | None:
    """The linear layer `name`, None where that is a parameter or another module."""
    owner, _, last = name.rpartition(".")
    module = base.get_submodule(owner)._modules.get(last)
    return module if isinstance(module, nn.Linear) else None


def _add_in_fp32(linear: nn.Linear, mesh: DeviceMesh) -> None:
    """Make the forward of a row-parallel `linear` multiply and add over the ranks in float32, and round once."""

    def forward(states: Tensor) -> Tensor:
        partial = _product_in_fp32(states, _local(linear.weight))
        dist.all_reduce(partial, group=mesh.get_group())
        bias = _local_bias(linear)
        if bias is not None:
            partial += bias
        return partial.to(states.dtype)

    setattr(linear, "forward", forward)  # noqa: B010  # the way in which transformers puts its own in place


def _gather_around(linear: nn.Linear, mesh: DeviceMesh) -> None:
    """Make `linear`, of which each rank holds some output features, gather its inputs and then its outputs.

    No sum is split over the ranks, so that every element is the one sum that one device makes.
    """
    group = mesh.get_group()

    def forward(states: Tensor) -> Tensor:
        features = F.linear(_gathered(states, group), _local(linear.weight), _local_bias(linear))
        return _gathered(features, group)

    setattr(linear, "forward", forward)  # noqa: B010  # as above


def _gathered(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Join the last dimension of the `states` (..., K) of all ranks."""
    parts = [torch.empty_like(states, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, states.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def _product_in_fp32(states: Tensor, weight: Tensor) -> Tensor:
    """`states` (..., K) times the transpose of `weight` (N, K), accumulated and returned in float32."""
    if states.is_cuda and states.dtype != torch.float32:
        product = torch.mm(states.flatten(0, -2), weight.t(), out_dtype=torch.float32)
        return product.view(*states.shape[:-1], -1)
    return F.linear(states.float(), weight.float())


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _local_bias(linear: nn.Linear) -> Tensor | None:
    bias: Tensor | None = linear._parameters["bias"]
    return None if bias is None else _local(bias)
