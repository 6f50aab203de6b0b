"""Loading a target of which each rank holds a part, through transformers' own loader.

The model is built without memory, given its shape on this rank (parameters replaced by their shards, layers of other
stages taken out), and then filled: for a sharded parameter the loader reads only this rank's slice of the checkpoint,
after whatever renaming and merging the model asks for, and it makes buffers that no checkpoint holds anew.

transformers makes some parameters from several tensors of a checkpoint. For a sharded parameter it slices each of them
first and joins the slices, which gives another order of rows than slicing what was joined, and no error. Such
parameters are read whole and sliced afterwards: convolutions of linear attention, and experts fewer than the ranks.
"""

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.distributed.sharding_utils import DtensorShardOperation

from dspark_store.target.facts import model_without_weights
from dspark_store.target.load import refuse_unloaded_weights, require_accelerate
from dspark_store.target.source import TargetSource, locate, one_line_errors


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


type Shape = Callable[[PreTrainedModel], None]


def build_skeleton(source: TargetSource, config: PretrainedConfig) -> PreTrainedModel:
    """Build the target on the meta device: its modules and shapes, without weights.

    Raises ValueError, in one line that names the model, when transformers cannot build it.
    """
    with one_line_errors(source, "configuration"):
        return model_without_weights(deepcopy(config), trust_remote_code=source.trust_remote_code)


def load_shaped_target(
    source: TargetSource,
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    shape: Shape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """Load what `shape` leaves of a `model_class`, frozen and in eval mode, with weights as `load_target` reads them.

    `shape` gets the model on the meta device.

    Raises ValueError, in one line that names the model, when it cannot be loaded or a weight is absent from the
    checkpoint or has another shape, and ImportError when accelerate is needed and not installed.
    """
    shaped: list[tuple[PreTrainedModel, dict[str, DTensor]]] = []

    def shape_frozen(model: PreTrainedModel) -> None:
        model.requires_grad_(False)
        conversions = Conversions.of(model)
        shape(model)
        shaped.append((model, unshard_wrongly_sliced(model, conversions)))

    attention: dict[str, Any] = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with one_line_errors(source, "weights"):
        loaded = _with_shape(model_class, shape_frozen).from_pretrained(
            locate(source).name,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, all of them by name
            **attention,
            **_placement(device),
        )
    model, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    if [entry[0] for entry in shaped] != [model]:
        raise RuntimeError("this version of transformers loads weights in another way: install 5.24")
    refuse_unloaded_weights(source, info)
    slice_again(model, shaped[0][1])
    model.__class__ = model_class
    model.eval()  # type: ignore[no-untyped-call]  # untyped in transformers
    model.requires_grad_(False)
    return model


def shard_head(model: PreTrainedModel, mesh: DeviceMesh, *, tied: bool) -> None:
    """Share the rows of the output head out over `mesh`, or let it be the embedding, sharded before, when it is `tied`.

    The head is never run: its weight is only kept, for the vocabulary tables.
    """
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # untyped in transformers
    if head is None:
        return
    if tied:
        head.weight = model.get_input_embeddings().weight
        return
    for name, parameter in list(head.named_parameters(recurse=False)):
        share = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
        head.register_parameter(name, nn.Parameter(share, requires_grad=False))


def _with_shape(model_class: type[PreTrainedModel], shape: Shape) -> type[PreTrainedModel]:
    """A subclass that shapes the built model just before its weights are read.

    It bears the name of `model_class`, by which transformers finds the conversions of a checkpoint.
    """

    def load(model: PreTrainedModel, *args: object, **kwargs: object) -> object:
        shape(model)
        return model_class._load_pretrained_model(model, *args, **kwargs)  # type: ignore[arg-type]

    members = {"_load_pretrained_model": staticmethod(load), "__module__": model_class.__module__}
    return cast(type[PreTrainedModel], type(model_class.__name__, (model_class,), members))


def _placement(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {}
    require_accelerate(f"loading a sharded target onto {device}")
    return {"device_map": {"": device}}
