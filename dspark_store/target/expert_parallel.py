"""Expert parallelism: whole experts on each rank, everything else on all of them, every rank of a group on one batch.

The model's own plan says which parameters are experts. The sum over a token's experts is made as one device makes it,
in the same order, so that states are equal to those of one device bit by bit.
"""

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import (
    EPImplementation,
    EPImplementationInterface,
    apply_expert_parallelism,
)

from dspark_store.target.capture import find_base_model
from dspark_store.target.model_plans import rules_by_name

_EXPERT_STYLES = frozenset({"grouped_gemm", "ep_dispatch_experts"})
_IN_ORDER = "dspark_store_in_order"


def shard_experts(model: PreTrainedModel, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
    """Share the experts of `model` out over `ep_mesh` by the rules of its plan that name experts.

    `tp_mesh` must be of one rank.

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
