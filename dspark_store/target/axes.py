"""The axes along which ranks share a target's weights: tensor, expert and fully sharded data parallelism."""

import re
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import (
    EPImplementation,
    EPImplementationInterface,
    apply_expert_parallelism,
)
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from dspark_store.target.capture import find_base_model
from dspark_store.target.parallel import ParallelPlan, ReduceDtype

_AXES = ("replica", "fsdp", "pp", "ep", "tp")
_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_SUMMED_STYLES = frozenset({"rowwise", "rowwise_rep"})
_EXPERT_STYLES = frozenset({"grouped_gemm", "ep_dispatch_experts"})
_IN_ORDER = "dspark_store_in_order"


def open_shard_groups(plan: ParallelPlan, device: torch.device) -> DeviceMesh | None:
    """Make the process groups of `plan`: replica, fsdp, pp, ep, tp. None when it shards nothing.

    A collective over the default process group.

    Raises ValueError when the default group has another number of ranks than the plan.
    """
    if not plan.sharded_axes:
        return None
    world_size = dist.get_world_size()
    if world_size != plan.world_size:
        raise ValueError(f"the plan is for {plan.world_size} processes: there are {world_size}")
    shape = (plan.replicas, plan.fsdp, plan.pp, plan.ep, plan.tp)
    return init_device_mesh(device.type, shape, mesh_dim_names=_AXES)


def rules_by_name(base: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """Name each module and parameter of `base` that `plan` has a rule for, with the rule's style.

    A plan writes "*" for the number of a layer. A rule for a module holds for its own parameters too. A module's
    parameters come before the module itself, which is the order in which transformers applies them.
    """
    rules: dict[str, str] = {}
    for name, module in base.named_modules():
        of_module = plan.get(_any_layer(name))
        for parameter, _ in module.named_parameters(recurse=False):
            full_name = f"{name}.{parameter}" if name else parameter
            style = plan.get(_any_layer(full_name), of_module)
            if style is not None:
                rules[full_name] = style
        if of_module is not None:
            rules[name] = of_module
    return rules


def _any_layer(name: str) -> str:
    return _LAYER_NUMBER.sub("*", name)


def shard_tensors(model: PreTrainedModel, mesh: DeviceMesh, reduce_dtype: ReduceDtype) -> None:
    """Share the weights of `model` out over `mesh` by its plan: every rank of a group runs one batch through its slice.

    Sums over the ranks are added in another order than one device adds, so that states differ from its in the last
    bits. With fp32 partial products nearly all bfloat16 elements of a layer come out the same; deeper layers see the
    few that do not. Gathering in place of adding avoids the split sums, and then only a kernel that adds otherwise for
    another width of its output could still differ: in bfloat16 on a CPU none did, in float32 less than 1 % of the
    elements.

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


def shard_experts(model: PreTrainedModel, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
    """Share the experts of `model` out over `ep_mesh`, whole ones, by the rules of its plan that name experts.

    Every rank of a group runs one batch; the sum over a token's experts is made in the order in which one device makes
    it, so that states are equal to its bit by bit. `tp_mesh` must be of one rank.

    Raises ValueError when the plan names no expert of the model.
    """
    base = cast(PreTrainedModel, find_base_model(model)[0])
    experts = {name: style for name, style in rules_by_name(base, base.ep_plan).items() if style in _EXPERT_STYLES}
    if not experts:
        raise ValueError(f"ep={ep_mesh.size()} is not possible: the expert parallel plan fits no module of the target")
    EPImplementationInterface.register(_IN_ORDER, InOrderExperts)
    apply_expert_parallelism(base, ep_mesh, tp_mesh, experts, _IN_ORDER)


class InOrderExperts(EPImplementation):
    """Brings each token the outputs of its experts, one by one, and adds them up as one device does.

    A sum of per-rank sums would add in another order as soon as a token has three experts. It costs as many states as
    a token has experts on the wire, in place of one.
    """

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        implementation = getattr(getattr(experts, "config", None), "_experts_implementation", None)
        # transformers' own loop over the experts adds in the order of the experts, its kernels in that of the slots.
        self._adds_one_by_one = implementation in (None, "eager")

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum (N, H) of the experts `top_k_index` (N, k) of `hidden_states` (N, H)."""
        tokens, slots = top_k_index.shape
        held = cast(int, self.num_local_experts)
        here = top_k_index // held == self.ep_mesh.get_local_rank()
        local = torch.where(here, top_k_index % held, held)  # the number after the last stands for none
        outputs: Tensor = self.experts_forward(
            hidden_states.repeat_interleave(slots, dim=0),
            local.reshape(-1, 1),
            torch.ones(tokens * slots, 1, dtype=hidden_states.dtype, device=hidden_states.device),
        )
        dist.all_reduce(outputs, group=self.ep_mesh.get_group())  # exact: the other ranks' outputs are zero
        weighted = outputs.view(tokens, slots, -1) * top_k_weights.unsqueeze(-1)
        if self._adds_one_by_one:
            return add_by_expert(weighted.to(hidden_states.dtype), top_k_index)
        return weighted.sum(dim=1).to(hidden_states.dtype)


def add_by_expert(weighted: Tensor, top_k_index: Tensor) -> Tensor:
    """Add the outputs (N, k, H) of each token one after another, in the order of the experts' ids."""
    order = torch.argsort(top_k_index, dim=1)
    ordered = weighted.gather(1, order.unsqueeze(-1).expand_as(weighted))
    total = torch.zeros_like(weighted[:, 0])
    for slot in range(weighted.shape[1]):
        total += ordered[:, slot]
    return total


def shard_fully(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Share every weight of the base model out over `mesh` by FSDP2, a group for each decoder layer, one for the rest.

    A layer's weights are gathered just before it runs.
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
