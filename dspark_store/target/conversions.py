"""Weights that a sharded load must read whole.

transformers makes some parameters from several tensors of a checkpoint. For a sharded parameter it slices each of them
first and joins the slices, which gives another order of rows than slicing what was joined, and no error. Such
parameters are read whole and sliced afterwards: convolutions of linear attention, and experts fewer than the ranks.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.distributed.sharding_utils import DtensorShardOperation


@dataclass(frozen=True, slots=True)
class Conversions:
    """How a model's parameters are made from a checkpoint; asked for before the model is sharded."""

    converters: tuple[WeightConverter, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Conversions":
        """The conversions that transformers applies when it loads `model`."""
        mapping = get_model_conversion_mapping(model)
        return cls(tuple(entry for entry in mapping if isinstance(entry, WeightConverter)))

    def slices_wrongly(self, name: str, parameter: DTensor) -> bool:
        """Whether a slice of the parameter `name` cannot be made from slices of its sources."""
        makers = [entry for entry in self.converters if any(_names(target, name) for target in entry.target_patterns)]
        return any(not _commutes(operation, parameter) for entry in makers for operation in entry.operations)


def unshard_wrongly_sliced(model: PreTrainedModel, conversions: Conversions) -> dict[str, DTensor]:
    """Put whole parameters, without memory, in place of those that would be sliced wrongly; return these by name."""
    taken = {
        name: parameter for name, parameter in _sharded_parameters(model) if conversions.slices_wrongly(name, parameter)
    }
    for name, parameter in taken.items():
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        _set_parameter(model, name, whole)
    return taken


def slice_again(model: PreTrainedModel, taken: dict[str, DTensor]) -> None:
    """Replace the loaded parameters that `unshard_wrongly_sliced` made whole by this rank's slices of them."""
    for name, former in taken.items():
        whole = model.get_parameter(name).detach()
        sharded = DTensor.from_local(
            _slice_of(whole, former),
            former.device_mesh,
            former.placements,
            run_check=False,
            shape=former.shape,
            stride=former.stride(),
        )
        _set_parameter(model, name, sharded)


def _slice_of(whole: Tensor, like: DTensor) -> Tensor:
    shape = like.to_local().shape
    if 0 in shape:
        return whole.new_empty(shape)
    part = DtensorShardOperation(like).shard_tensor(whole, device=whole.device, dtype=whole.dtype)
    return cast(Tensor, part).clone()  # so that the whole one can go


def _sharded_parameters(model: nn.Module) -> Iterator[tuple[str, DTensor]]:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            yield name, parameter


def _set_parameter(model: nn.Module, name: str, value: Tensor) -> None:
    owner, _, last = name.rpartition(".")
    model.get_submodule(owner).register_parameter(last, nn.Parameter(value, requires_grad=False))


def _commutes(operation: object, parameter: DTensor) -> bool:
    """Whether `operation` on slices gives the slice of what it gives on whole tensors.

    Lists of experts are merged by number, which fails on a rank that gets none of them; packed pairs have a placement
    of their own (a strided one).
    """
    if isinstance(operation, MergeModulelist):
        return bool(operation.dim == 0 and parameter.to_local().shape[0] > 0)
    if not isinstance(operation, Concatenate):
        return False
    dimensions = {placement.dim % parameter.ndim for placement in parameter.placements if type(placement) is Shard}
    return operation.dim % parameter.ndim not in dimensions


def _names(target: str, name: str) -> bool:
    """Whether the target pattern of a conversion, in which "*" or a group stands for anything, names a parameter."""
    pieces = re.split(r"\*|\\\d", target.replace("\\.", "."))
    return re.search(".*".join(re.escape(piece.strip("^$")) for piece in pieces), name) is not None
