"""The target of a job: described before any weight is loaded, shared out to ranks, loaded when it is first needed."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig

from dspark_store.precompute.crew import ControlGroups, open_control_groups
from dspark_store.precompute.ranks import World
from dspark_store.precompute.settings import PrecomputeConfig
from dspark_store.precompute.undo import TargetError
from dspark_store.target.device import can_hold_tensors, index_of, resolve_compute_dtype
from dspark_store.target.layers import cut_target_config, resolve_reduced_target_layers
from dspark_store.target.load import input_device, load_target, load_target_config, read_model_type, text_config
from dspark_store.target.parallel import ParallelPlan, ReduceDtype
from dspark_store.target.sharded import ShardedTarget, load_sharded_target
from dspark_store.target.source import TargetSource, locate

_log = logging.getLogger(__name__)
_GRACE_MINUTES = 1.0
"""What a collective may take longer than a rank without progress, so that the watch, which can name it, is first."""


@dataclass(frozen=True, slots=True)
class TargetDescription:
    """The target as its configuration describes it, before any weight is loaded.

    ``config`` is that of its first ``num_layers`` layers where it is cut to them, and of the whole target where that
    is None; ``depth`` counts the layers of the whole target.
    """

    source: TargetSource
    model_type: str
    config: PretrainedConfig
    depth: int
    num_layers: int | None

    @property
    def text(self) -> PretrainedConfig:
        """The part of ``config`` that describes the language model."""
        return text_config(self.config)


def describe_target(config: PrecomputeConfig) -> TargetDescription:
    """Read the target's configuration; ValueError when there is none, or it is of no use."""
    source = TargetSource(config.target_model, config.trust_remote_code)
    model_type = read_model_type(source)
    target_config = load_target_config(source)
    depth = int(text_config(target_config).num_hidden_layers)
    num_layers = resolve_reduced_target_layers(depth, config.target_num_hidden_layers)
    if num_layers is not None:
        target_config = cut_target_config(target_config, num_layers)
    return TargetDescription(source, model_type, target_config, depth, num_layers)


def plan_target(config: PrecomputeConfig, world_size: int, target: TargetDescription) -> ParallelPlan:
    """Decide how ``world_size`` ranks share the target, from its description alone.

    ValueError naming the axis when the target cannot be shared out so.
    """
    if config.device_map is not None and world_size > 1:
        raise ValueError(f"device-map {config.device_map} places the target in one process: run it without torchrun")
    plan = ParallelPlan(
        world_size,
        fsdp=config.resolved_fsdp_size(target.model_type, world_size),
        tp=config.tp_size,
        ep=config.ep_size,
        pp=config.pp_size,
        reduce_dtype=cast(ReduceDtype, config.reduce_dtype),
    )
    plan.check(target.text, gguf=locate(target.source).gguf_file is not None)
    return plan


def equality_class(plan: ParallelPlan, device: torch.device) -> str:
    """Name what decides the last bits of a state: the kind of device, and how its sums are split.

    A replicated target, FSDP2, expert parallelism and a pipeline give the bits of one device; tensor parallelism does
    not.
    """
    return f"{device.type} {plan.equality_class}"


def rank_device(config: PrecomputeConfig, world: World) -> torch.device:
    """Return where this rank runs the target: of several ranks on a host, each has a CUDA device of its own.

    That becomes the process's current device before anything is allocated: a CUDA context on another rank's device
    would take memory there. ValueError when there is no such device, or it is not known which is this rank's.
    """
    device = config.resolved_device
    if device.type != "cuda":
        return device
    if world.size > 1:
        device = torch.device("cuda", _own_index(index_of(device), world.local_rank))
    if index_of(device) is not None:
        torch.cuda.set_device(device)
    if not can_hold_tensors(device):
        raise ValueError(f"device '{device}' cannot be used: torch cannot make a tensor on it; see nvidia-smi")
    return device


def _own_index(asked: int | None, local_rank: int | None) -> int:
    """Return the index of a rank's CUDA device, given the one that was asked for and the rank's number on its host."""
    if local_rank is None:
        raise ValueError("LOCAL_RANK is not set, so this rank's CUDA device is not known: start the job with torchrun")
    if asked is not None and local_rank > 0:
        raise ValueError(
            f"device 'cuda:{asked}' is one for {local_rank + 1} or more processes on this host: give --device cuda, "
            "for one a process"
        )
    if not 0 <= local_rank < torch.cuda.device_count():
        raise ValueError(
            f"LOCAL_RANK is {local_rank} on a host of {torch.cuda.device_count()} CUDA devices: start one process a "
            "device, and let each see all of them"
        )
    return local_rank if asked is None else asked


@dataclass(slots=True)
class JobTarget:
    """The target of a job on one rank."""

    config: PrecomputeConfig
    world: World
    plan: ParallelPlan
    num_layers: int | None
    device: torch.device = field(init=False)
    control: ControlGroups = field(init=False, default_factory=lambda: ControlGroups(None, None))
    _groups: DeviceMesh | None = field(init=False, default=None)
    _loaded: ShardedTarget | None = field(init=False, default=None)
    _offload: TemporaryDirectory[str] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.device = rank_device(self.config, self.world)

    @property
    def loaded(self) -> ShardedTarget:
        """The target; where ranks share it, all of them must ask for it together.

        TargetError when it cannot be loaded as asked.
        """
        if self._loaded is None:
            _log.info("loading the target %s", self.config.target_model)
            try:
                self._loaded = self._load()
            except ValueError as error:
                raise TargetError(str(error)) from error
        return self._loaded

    def _load(self) -> ShardedTarget:
        config, rank = self.config, self.world.rank
        source = TargetSource(config.target_model, config.trust_remote_code)
        dtype, attention = resolve_compute_dtype(config.compute_dtype, self.device), config.target_attn_implementation
        if config.device_map is None:
            return load_sharded_target(
                source,
                self.plan,
                rank,
                dtype=dtype,
                device=self.device,
                groups=self._groups,
                attn_implementation=attention,
                num_layers=self.num_layers,
            )
        self._offload = TemporaryDirectory(prefix="dspark-offload-")
        model = load_target(
            source,
            dtype=dtype,
            device=self.device,
            attn_implementation=attention,
            num_layers=self.num_layers,
            device_map=config.device_map,
            offload_folder=self._offload.name,
        )
        return ShardedTarget(model, self.plan, rank)

    @property
    def input_device(self) -> torch.device:
        """Where batches go: `device`, or where a device map has put the embedding."""
        return self.device if self.config.device_map is None else input_device(self.loaded.model)

    @contextmanager
    def groups_open(self) -> Iterator[None]:
        """Hold the process groups of a sharded target for the block, and the folder of what a device map offloads."""
        if not self.plan.sharded_axes or self.world.rendezvous is None:
            try:
                yield
            finally:
                if self._offload is not None:
                    self._offload.cleanup()
            return
        from dspark_store.target.axes import open_shard_groups  # which an older transformers lacks parts for

        backend = self.config.resolved_backend
        if self.device.type == "cuda":
            backend = f"cpu:gloo,cuda:{backend}"
        dist.init_process_group(
            backend,
            store=self.world.rendezvous.group_store(),
            rank=self.world.rank,
            world_size=self.world.size,
            timeout=dt.timedelta(minutes=self.config.timeout_minutes + _GRACE_MINUTES),
        )
        self._groups = open_shard_groups(self.plan, self.device)
        self.control = open_control_groups(self.plan)
        yield
        if self._loaded is not None:
            self._loaded.finish()
        dist.destroy_process_group()
