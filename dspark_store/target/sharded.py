"""A target that several ranks hold together: loading, capture and the vocabulary tables, alike for every plan."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dspark_store.target.axes import ShardGroups, shard_experts, shard_fully, shard_tensors
from dspark_store.target.capture import StageStates, TargetCapture, find_base_model
from dspark_store.target.facts import VocabularyWeights, gather_vocabulary, head_facts
from dspark_store.target.layers import cut_target_config
from dspark_store.target.load import load_target, load_target_config, text_config
from dspark_store.target.parallel import ParallelPlan
from dspark_store.target.pipeline import PipelineStage
from dspark_store.target.shaped import Shape, build_skeleton, load_shaped_target, shard_head
from dspark_store.target.source import TargetSource, locate

type StageCapture = Callable[[Tensor, Tensor], StageStates]


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
        capture = TargetCapture(self.model, layer_ids)
        slots = tuple(range(len(capture.layer_ids)))

        def run(input_ids: Tensor, attention_mask: Tensor) -> StageStates:
            states = capture(input_ids, attention_mask)
            return StageStates(slots, states.layers, states.last)

        return run

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
    groups: ShardGroups | None,
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
    skeleton = build_skeleton(source, config)
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


def _sharding(plan: ParallelPlan, groups: ShardGroups, *, tied: bool) -> Shape:
    """Tensor or expert parallelism first: FSDP then shares out what each rank is left with."""

    def shard(model: PreTrainedModel) -> None:
        if plan.tp > 1:
            shard_tensors(model, groups.axis("tp"), plan.reduce_dtype)
        if plan.ep > 1:
            shard_experts(model, groups.axis("ep"), groups.axis("tp"))
        if plan.fsdp > 1:
            shard_fully(model, groups.axis("fsdp"))
        shard_head(model, groups.axis(plan.sharded_axes[0]), tied=tied)

    return shard
