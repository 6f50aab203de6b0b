"""How the ranks of a job share one target: which of them hold which weights, and which see the same batch.

Pure arithmetic. Ranks are numbered with the replica outermost, then the FSDP rank, the pipeline stage, the expert rank
and, innermost, the tensor-parallel rank, so that the ranks that talk most are neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from transformers import PretrainedConfig

type ReduceDtype = Literal["compute", "fp32", "gather"]
REDUCE_DTYPES: tuple[ReduceDtype, ...] = get_args(ReduceDtype.__value__)
"""The values of `ReduceDtype`."""

SHARES_SINCE = "5.24"
"""The first version of transformers that shares a target out as it is done here."""
_HEAD_COUNTS = ("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads")
_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
_HEAD_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "q_b_proj", "kv_b_proj")
_SHARING_LAYERS = frozenset({"glm_moe_dsa"})  # a layer attends to the keys that one before it chose
# Every other pair of axes either has no use for a target that is only run forward, or is not tested.
_COMBINATIONS = (frozenset({"fsdp", "ep"}), frozenset({"fsdp", "tp"}))


def is_transformers(least: str) -> bool:
    """Whether the installed transformers is of this version or newer."""
    installed, wanted = (tuple(map(int, each.split(".")[:2])) for each in (version("transformers"), least))
    return installed >= wanted


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank stands on each axis, all counted from 0."""

    replica: int
    fsdp_rank: int
    stage: int
    ep_rank: int
    tp_rank: int


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """Degrees of the axes along which `world_size` ranks share a target; the rest of the ranks are replicas.

    `fsdp` ranks each hold a slice of every weight and run batches of their own in step; `tp`, `ep` and `pp` ranks run
    one batch together. `reduce_dtype` says how tensor parallelism adds over its ranks: "compute" in the model's dtype,
    "fp32" with partial products in float32, and "gather" not at all: the inputs of what would be summed are gathered
    instead, about as many bytes as with fp32, and each element is one sum, as on one device.

    Raises ValueError, naming the axis, for a degree below 1, a world that does not divide, a combination that is not
    supported and an unknown `reduce_dtype`.
    """

    world_size: int
    fsdp: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1
    reduce_dtype: ReduceDtype = "compute"

    def __post_init__(self) -> None:
        for name, degree in (("world_size", self.world_size), *self._degrees()):
            if degree < 1:
                raise ValueError(f"{name}={degree} is not a degree of parallelism: expected an integer of at least 1")
        if self.reduce_dtype not in REDUCE_DTYPES:
            raise ValueError(
                f"reduce_dtype={self.reduce_dtype!r} is unknown: expected one of {', '.join(REDUCE_DTYPES)}"
            )
        axes = frozenset(self.sharded_axes)
        if len(axes) > 1 and axes not in _COMBINATIONS:
            raise ValueError(
                f"{self._shown()} cannot be combined: expected one axis above 1, or fsdp with tp or with ep"
            )
        if self.world_size % self.replica_size:
            size, fewer = self.replica_size, self.world_size - self.world_size % self.replica_size
            raise ValueError(
                f"{self._shown()} needs a multiple of {size} processes: there are {self.world_size}; start "
                f"{f'{fewer} or ' if fewer else ''}{fewer + size}, or give sizes whose product divides "
                f"{self.world_size}"
            )

    @property
    def sharded_axes(self) -> tuple[str, ...]:
        """Names of the axes whose degree is above 1."""
        return tuple(name for name, degree in self._degrees() if degree > 1)

    @property
    def kind(self) -> str:
        """A name for what is done: single, replicated, or the sharded axes such as "fsdp2+ep"."""
        if self.sharded_axes:
            return "+".join("fsdp2" if name == "fsdp" else name for name in self.sharded_axes)
        return "single" if self.world_size == 1 else "replicated"

    @property
    def equality_class(self) -> str:
        """Stores of one class are equal bit by bit: "exact" when states are those of a single device.

        Only tensor parallelism adds in another order than one device does.
        """
        return "exact" if self.tp == 1 else f"tp{self.tp}-{self.reduce_dtype}"

    @property
    def crew_size(self) -> int:
        """Ranks that run one batch together."""
        return self.pp * self.ep * self.tp

    @property
    def replica_size(self) -> int:
        """Ranks that hold one copy of the target together."""
        return self.fsdp * self.crew_size

    @property
    def replicas(self) -> int:
        """Copies of the target."""
        return self.world_size // self.replica_size

    @property
    def crews(self) -> int:
        """Batches that are run at the same time."""
        return self.replicas * self.fsdp

    def place(self, rank: int) -> RankPlace:
        """Place `rank` on each axis. Raises ValueError when it is not in [0, world_size)."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not one of {self.world_size} ranks")
        rest, tp_rank = divmod(rank, self.tp)
        rest, ep_rank = divmod(rest, self.ep)
        rest, stage = divmod(rest, self.pp)
        replica, fsdp_rank = divmod(rest, self.fsdp)
        return RankPlace(replica, fsdp_rank, stage, ep_rank, tp_rank)

    def crew(self, rank: int) -> tuple[int, ...]:
        """Ranks that run the same batches as `rank`, itself included."""
        return self._block(rank, self.crew_size)

    def lockstep(self, rank: int) -> tuple[int, ...]:
        """Ranks that must make as many forwards as `rank`, itself included: those of its replica."""
        return self._block(rank, self.replica_size)

    def leader(self, rank: int) -> int:
        """The first rank of the crew."""
        return self.crew(rank)[0]

    def writes(self, rank: int) -> bool:
        """Whether `rank` stores what it captures: one rank of a crew does or, in a pipeline, one of each stage."""
        place = self.place(rank)
        return place.ep_rank == 0 and place.tp_rank == 0

    def stage_layers(self, num_layers: int, stage: int) -> range:
        """Decoder layers of a pipeline stage; the first stages take one more when `num_layers` does not divide."""
        size, more = divmod(num_layers, self.pp)
        start = stage * size + min(stage, more)
        return range(start, start + size + (stage < more))

    def check(self, config: PretrainedConfig, *, gguf: bool = False) -> None:
        """Refuse what cannot work for the target of the text configuration `config`, before any weight is loaded.

        `gguf` says that the weights are a GGUF file.

        Raises ValueError naming the axis.
        """
        if self.sharded_axes and not is_transformers(SHARES_SINCE):
            raise ValueError(
                f"{self._shown()} needs transformers {SHARES_SINCE} or newer, and {version('transformers')} is "
                "installed: install a newer one, or replicate the target"
            )
        if gguf and self.sharded_axes:
            raise ValueError(
                f"{self._shown()} does not work with a GGUF file: convert it to safetensors, or replicate the target"
            )
        if self.tp > 1:
            self._check_tensor_parallel(config)
        if self.ep > 1:
            self._check_expert_parallel(config)
        if self.pp > 1:
            self._check_pipeline(config)

    def _check_tensor_parallel(self, config: PretrainedConfig) -> None:
        plan = _named_plan(config, "base_model_tp_plan")
        if not plan:
            raise ValueError(
                f"tp={self.tp} is not possible: transformers has no tensor parallel plan for "
                f"model_type={config.model_type!r}; use fsdp, pp or ep"
            )
        if (
            self.reduce_dtype != "compute"
            and "moe_tp_experts" in plan.values()
            and any(_counts(config, _EXPERT_COUNTS))
        ):
            raise ValueError(
                f"tp={self.tp} with reduce_dtype={self.reduce_dtype} does not reach into the experts of "
                f"model_type={config.model_type!r}: use ep, which is exact, or reduce_dtype=compute"
            )
        if any(rule.rsplit(".", 1)[-1] in _HEAD_PROJECTIONS for rule in plan):
            for name, count in _counts(config, _HEAD_COUNTS):
                if count % self.tp:
                    raise ValueError(
                        f"tp={self.tp} does not divide the target's {name}={count}: give a tp that does, or use fsdp"
                    )

    def _check_expert_parallel(self, config: PretrainedConfig) -> None:
        if not _named_plan(config, "base_model_ep_plan"):
            raise ValueError(
                f"ep={self.ep} is not possible: transformers has no expert parallel plan for "
                f"model_type={config.model_type!r}; use fsdp, pp or tp"
            )
        counts = list(_counts(config, _EXPERT_COUNTS))
        if not counts:
            raise ValueError(f"ep={self.ep} is not possible: the target's configuration names no experts; use fsdp")
        for name, count in counts:
            if count % self.ep:
                raise ValueError(
                    f"ep={self.ep} does not divide the target's {name}={count}: give an ep that does, or use fsdp"
                )

    def _check_pipeline(self, config: PretrainedConfig) -> None:
        depth = config.num_hidden_layers
        if self.pp > depth:
            raise ValueError(f"pp={self.pp} is more than the target's {depth} layers: give at most {depth}")
        if config.model_type in _SHARING_LAYERS or getattr(config, "num_kv_shared_layers", None):
            raise ValueError(
                f"pp={self.pp} does not work for model_type={config.model_type!r}, whose layers share more than their "
                "states: use fsdp"
            )

    def _degrees(self) -> tuple[tuple[str, int], ...]:
        return (("fsdp", self.fsdp), ("pp", self.pp), ("ep", self.ep), ("tp", self.tp))

    def _shown(self) -> str:
        return " ".join(f"{name}={degree}" for name, degree in self._degrees() if degree > 1)

    def _block(self, rank: int, size: int) -> tuple[int, ...]:
        self.place(rank)
        first = rank - rank % size
        return tuple(range(first, first + size))


def _named_plan(config: PretrainedConfig, name: str) -> dict[str, str]:
    plan: dict[str, str] | None = getattr(config, name, None)
    return plan or {}


def _counts(config: PretrainedConfig, names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Numbers in the configuration, one per layer where it holds a list; a name it lacks gives none."""
    for name in names:
        value = getattr(config, name, None)
        for count in value if isinstance(value, list | tuple) else [value]:
            if isinstance(count, int) and count > 0:
                yield name, count
