"""Loading a target of which each rank holds a part, through transformers' own loader.

The model is built without memory, given its shape on this rank (parameters replaced by their shards, layers of other
stages taken out), and then filled: for a sharded parameter the loader reads only this rank's slice of the checkpoint,
after whatever renaming and merging the model asks for, and it makes buffers that no checkpoint holds anew.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PretrainedConfig, PreTrainedModel

from dspark_store.target.conversions import Conversions, slice_again, unshard_wrongly_sliced
from dspark_store.target.facts import model_without_weights
from dspark_store.target.load import refuse_unloaded_weights
from dspark_store.target.placement import require_accelerate
from dspark_store.target.source import TargetSource, locate, one_line_errors

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
