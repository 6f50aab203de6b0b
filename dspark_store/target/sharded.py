"""A target that several ranks hold together: loading, capture and the vocabulary tables, alike for every plan.

It is loaded through transformers' own loader. The model is built without memory, given its shape on this rank
(parameters replaced by their shards, layers of other stages taken out), and then filled: for a sharded parameter the
loader reads only this rank's slice of the checkpoint, after whatever renaming and merging the model asks for, and it
makes buffers that no checkpoint holds anew.

transformers makes some parameters from several tensors of a checkpoint. For a sharded parameter it slices each of them
first and joins the slices, which gives another order of rows than slicing what was joined, and no error. Such
parameters are read whole and sliced afterwards: convolutions of linear attention, and experts fewer than the ranks.
"""

import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from dspark_store.target.capture import StageCapture, TargetCapture, find_base_model
from dspark_store.target.facts import VocabularyWeights, gather_vocabulary, head_facts, model_without_weights
from dspark_store.target.layers import cut_target_config
from dspark_store.target.load import (
    direct_placement,
    load_target,
    load_target_config,
    read_weights,
    require_accelerate,
    text_config,
)
from dspark_store.target.parallel import ParallelPlan
from dspark_store.target.pipeline import PipelineStage
from dspark_store.target.source import TargetSource, locate, one_line_errors

type Shape = Callable[[PreTrainedModel], None]


class ShardedTarget:
    """The part of a target that one rank holds, and what the ranks do together with it."""

    def __init__(
        self, model: PreTrainedModel, plan: ParallelPlan, rank: int, stage: PipelineStage | None = None
    ) -> None:
        self.model = model
        self.plan = plan
        self.rank = rank
        self._stage = stage

    def capture(self, layer_ids: Sequence[int]) -> StageCapture:
        """Return a function that runs a batch and gives the states of `layer_ids` that this rank holds.

        It takes `input_ids` and `attention_mask` (B, S) on the target's device: the same on all ranks of a crew, each
        of which must call it, as must all ranks of a lockstep group equally often.

        Raises ValueError as `TargetCapture` does.
        """
        if self._stage is not None:
            return self._stage.capture(self.model, layer_ids)
        return TargetCapture(self.model, layer_ids)

    def weights(self) -> VocabularyWeights | None:
        """Gather the vocabulary tables: whole on rank 0, None on the others. Every rank must call it."""
        if self._stage is not None:
            return self._stage.weights(self.model) if self.plan.place(self.rank).replica == 0 else None
        return gather_vocabulary(self.model, keep=self.rank == 0)

    def finish(self) -> None:
        """Wait until the next stage of a pipeline has what this one sent; before the process groups are destroyed."""
        if self._stage is not None:
            self._stage.finish()


def load_sharded_target(
    source: TargetSource,
    plan: ParallelPlan,
    rank: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    groups: DeviceMesh | None,
    attn_implementation: str | None = None,
    num_layers: int | None = None,
) -> ShardedTarget:
    """Load what `rank` holds of the target under `plan`; `groups` are those of `open_shard_groups`.

    `num_layers` cuts the target to its first layers, as in `load_target`.

    A plan that shards nothing loads the whole target with `load_target`. All ranks call this together.

    Raises ValueError before any weight is read when the target cannot be shared out so, and as `load_target` does.
    """
    if groups is None:
        model = load_target(
            source, dtype=dtype, device=device, attn_implementation=attn_implementation, num_layers=num_layers
        )
        return ShardedTarget(model, plan, rank)
    config = load_target_config(source)
    if num_layers is not None:
        config = cut_target_config(config, num_layers)
    plan.check(text_config(config), gguf=locate(source).gguf_file is not None)
    with one_line_errors(source, "configuration"):
        skeleton = model_without_weights(deepcopy(config), trust_remote_code=source.trust_remote_code)
    facts = head_facts(skeleton)
    tied = bool(facts["tied"])
    num_layers = len(find_base_model(skeleton)[1])
    stage = PipelineStage(plan, rank, num_layers, groups, device, facts) if plan.pp > 1 else None
    model = load_shaped_target(
        source,
        type(skeleton),
        config,
        stage.keep_own if stage is not None else _sharding(plan, groups, tied=tied),
        dtype=dtype,
        device=device,
        attn_implementation=attn_implementation,
    )
    return ShardedTarget(model, plan, rank, stage)


def _sharding(plan: ParallelPlan, groups: DeviceMesh, *, tied: bool) -> Shape:
    """Tensor or expert parallelism first: FSDP then shares out what each rank is left with."""
    from dspark_store.target.axes import shard_experts, shard_fully, shard_tensors

    def shard(model: PreTrainedModel) -> None:
        if plan.tp > 1:
            shard_tensors(model, groups["tp"], plan.reduce_dtype)
        if plan.ep > 1:
            shard_experts(model, groups["ep"], groups["tp"])
        if plan.fsdp > 1:
            shard_fully(model, groups["fsdp"])
        _shard_head(model, groups[plan.sharded_axes[0]], tied=tied)

    return shard


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

    Raises ValueError as `load_target` does, and ImportError when accelerate is needed and not installed.
    """
    shaped: list[tuple[PreTrainedModel, dict[str, DTensor]]] = []

    def shape_frozen(model: PreTrainedModel) -> None:
        model.requires_grad_(False)
        conversions = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightConverter)]
        shape(model)
        shaped.append((model, _unshard_wrongly_sliced(model, conversions)))

    if device.type != "cpu":
        require_accelerate(f"loading a sharded target onto {device}")
    shaping = _with_shape(model_class, shape_frozen)
    model = read_weights(source, shaping, config, dtype, attn_implementation, direct_placement(device))
    if [entry[0] for entry in shaped] != [model]:
        raise RuntimeError("this version of transformers loads weights in another way: install 5.24")
    _slice_again(model, shaped[0][1])
    model.__class__ = model_class
    return model


def _shard_head(model: PreTrainedModel, mesh: DeviceMesh, *, tied: bool) -> None:
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


def _unshard_wrongly_sliced(model: PreTrainedModel, conversions: Sequence[WeightConverter]) -> dict[str, DTensor]:
    """Put whole parameters, without memory, in place of those that would be sliced wrongly; return these by name.

    `conversions` are how transformers makes parameters from a checkpoint, asked for before the model was sharded.
    """
    sharded = [(name, each) for name, each in model.named_parameters() if isinstance(each, DTensor)]
    taken: dict[str, DTensor] = {name: each for name, each in sharded if _is_sliced_wrongly(name, each, conversions)}
    for name, parameter in taken.items():
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        _set_parameter(model, name, whole)
    return taken


def _slice_again(model: PreTrainedModel, taken: dict[str, DTensor]) -> None:
    """Replace the loaded parameters that `_unshard_wrongly_sliced` made whole by this rank's slices of them."""
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
    from transformers.distributed.sharding_utils import DtensorShardOperation

    part = DtensorShardOperation(like).shard_tensor(whole, device=whole.device, dtype=whole.dtype)
    return cast(Tensor, part).clone()  # so that the whole one can go


def _is_sliced_wrongly(name: str, parameter: DTensor, conversions: Sequence[WeightConverter]) -> bool:
    """Whether a slice of the parameter `name` cannot be made from slices of its sources."""
    makers = [entry for entry in conversions if any(_names(target, name) for target in entry.target_patterns)]
    return any(not _commutes(operation, parameter) for entry in makers for operation in entry.operations)


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
