"""The job's settings: one frozen dataclass that says what is known, what is the default, and what cannot be."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from dspark_store.format.codecs import CODEC_PRESETS
from dspark_store.format.dtypes import CACHE_DTYPES
from dspark_store.settings import fill_settings, flag, settings_of, whole_number
from dspark_store.settings import setting as _setting
from dspark_store.sources.options import ChatOptions
from dspark_store.sources.registry import SpecValue, parse_source
from dspark_store.target.parallel import REDUCE_DTYPES

if TYPE_CHECKING:
    import torch

    from dspark_store.target.batches import BatchLimit

_NONFINITE = ("mark", "error")
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_BACKENDS = ("gloo", "nccl")
_AXES = ("fsdp_size", "tp_size", "ep_size", "pp_size")
_AT_LEAST_ONE = (
    *("batch_size", "shard_size", "seq_length", "draft_num_hidden_layers", "target_num_hidden_layers"),
    *("batch_tokens", "max_samples", "write_buffer_bytes", "tp_size", "ep_size", "pp_size"),
)

SHARDED_MODEL_TYPES = frozenset({"deepseek_v4", "glm_moe_dsa", "kimi_k3", "kimi_linear"})
"""Types of targets that NeMo Automodel's precompute loads in shards; it replicates every other one."""


def _shuffle_seed(value: object) -> int | None:
    return None if str(value).lower() == "none" else whole_number(value)


def _source(value: SpecValue) -> SpecValue:
    """Return a source as it was given, once it is known to be one."""
    parse_source(value)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecomputeConfig(ChatOptions):
    """Everything a precompute is told. The names are the flags' names with underscores."""

    target_model: str = _setting("the target: a hub id, a directory, or a .gguf file", group="target")
    input_data: SpecValue = _setting(  # noqa: RUF009 - it makes a field, as all of these do
        "files, globs or datasets of conversations, or any other source (docs/sources.md)",
        nargs="+",
        convert=_source,
        expected="a source of tokens: a path, a mapping with a type, or a list",
        group="data",
    )
    output_dir: str = _setting("where the store is written", group="store")
    seq_length: int = _setting(
        "S, the most tokens a sample has; longer conversations are truncated", 2048, group="data"
    )
    batch_size: int = _setting("samples per forward", 4, group="target")
    batch_tokens: int | None = _setting(
        "instead of --batch-size: most tokens per forward, padding included; a longer sample runs alone",
        None,
        type=int,
        metavar="N",
        group="target",
    )
    shard_size: int = _setting("R, the samples of a shard, which is the unit of commit and resume", 256, group="store")
    dtype: str = _setting("dtype of the stored states", "bf16", choices=tuple(CACHE_DTYPES), group="store")
    device: str = _setting(
        "where the target runs: cuda where there is one, else cpu", "", metavar="DEVICE", group="target"
    )
    num_workers: int = _setting("processes that tokenise; 0 tokenises in this one", 0, group="data")
    split: str | None = _setting("a slice of the rows, name[a:b], taken after the shuffle", None, group="data")
    shuffle_seed: int | None = _setting(
        "seed of the order of rows; none keeps the file's order",
        42,
        type=str,
        convert=_shuffle_seed,
        expected="a whole number or none",
        nullable=True,
        group="data",
    )
    draft_num_hidden_layers: int = _setting("layers to capture when --target-layer-ids is not given", 5, group="target")
    target_layer_ids: tuple[int, ...] = _setting(
        "layers to capture: -1 is the embedding", (), nargs="+", type=int, group="target"
    )
    chat_template: str | None = _setting("a chat template, inline Jinja or a file", None, group="data")
    target_force_hf: bool = _setting(
        "accepted for compatibility: every target loads through transformers", False, group="target"
    )
    trust_remote_code: bool = _setting("let the target's repository run its own code", False, group="target")
    resume: bool = _setting("go on with the store in --output-dir, doing the shards it lacks", False, group="recovery")
    target_attn_implementation: str | None = _setting("attention of the target: eager, sdpa, ...", None, group="target")
    log_level: str = _setting("least level of log messages", "INFO", choices=_LOG_LEVELS, group="advanced")
    compute_dtype: str = _setting(
        "dtype that the target computes in; auto is bf16 on CUDA, else fp32",
        "auto",
        choices=("auto", *CACHE_DTYPES),
        group="target",
    )
    codec: str = _setting("how states are compressed", "default", choices=CODEC_PRESETS, group="store")
    chunk_tokens: int = _setting("tokens a chunk; 0 chooses by hidden size and codec", 0, group="store")
    max_samples: int | None = _setting(
        "take at most this many rows, after shuffle and split", None, type=int, group="data"
    )
    on_nonfinite: str = _setting(
        "mark samples whose states are not finite in the cache dtype, or stop",
        "mark",
        choices=_NONFINITE,
        group="store",
    )
    encode_threads: int = _setting("threads that compress; 0 is one a core, at most 8", 0, group="advanced")
    write_buffer_bytes: int = _setting(
        "bytes of states that may wait for the encoders", 512 * 1024 * 1024, group="advanced"
    )
    estimate: bool = _setting(
        "print tokens, bytes and hours to come, and stop before the target is loaded", False, group="advanced"
    )
    tokens_per_second: float | None = _setting(
        "rate of the target that --estimate reckons with", None, type=float, group="advanced"
    )
    smoke: int = _setting(
        "first run this many samples into a temporary store and check it", 0, metavar="N", group="advanced"
    )
    fsdp_size: int = _setting(
        "ranks that share one copy of the target by FSDP2; 0 shards where Automodel does", 1, group="ranks"
    )
    tp_size: int = _setting("ranks that share one copy of the target by tensor parallelism", 1, group="ranks")
    ep_size: int = _setting("ranks that share the experts of one copy of the target", 1, group="ranks")
    pp_size: int = _setting(
        "ranks that share the layers of one copy of the target, as a pipeline of stages", 1, group="ranks"
    )
    reduce_dtype: str = _setting(
        "how tensor parallelism adds: partial sums in the compute dtype or in fp32; gather adds as one device does",
        "compute",
        choices=REDUCE_DTYPES,
        group="ranks",
    )
    device_map: str | None = _setting(
        "auto spreads the target over the devices and memory of one process", None, choices=("auto",), group="target"
    )
    target_num_hidden_layers: int | None = _setting(
        "diagnosis only: run no more than the first layers of the target", None, type=int, metavar="N", group="advanced"
    )
    backend: str = _setting("torch.distributed backend: nccl on CUDA, else gloo", "", choices=_BACKENDS, group="ranks")
    timeout_minutes: float = _setting(
        "minutes after which a rank that makes no progress ends the job", 30.0, group="ranks"
    )
    take_over: bool = _setting("write to a store that another living job has locked", False, group="recovery")
    mix_equality_classes: bool = _setting(
        "let workers whose states may differ in the last bits add to a store", False, group="recovery"
    )
    profile: bool = _setting(
        "tell at the end how the time was shared: forward, copy, encode, write, waiting", False, group="advanced"
    )
    notes: tuple[str, ...] = field(default=(), compare=False)
    """What the user is to be told about the configuration file, a line each; no setting."""

    def check(self) -> None:
        """Raise ValueError naming the first setting that cannot be."""
        for name in _AT_LEAST_ONE:
            self._at_least(name, 1)
        for name in ("num_workers", "chunk_tokens", "encode_threads", "smoke", "fsdp_size"):
            self._at_least(name, 0)
        for name in ("tokens_per_second", "timeout_minutes"):
            self._is_positive(name)
        self.check_options()
        if self.batch_tokens is None and self.shard_size % self.batch_size:
            raise ValueError(f"shard-size {self.shard_size} is not a multiple of batch-size {self.batch_size}")
        for setting in fields(self):
            choices, value = setting.metadata.get("choices"), getattr(self, setting.name)
            if choices and value not in (setting.default, *choices):
                raise ValueError(f"{flag(setting.name)} must be one of {', '.join(choices)}, got {value!r}")
        if self.device_map is not None:
            self._refuse_axes_beside_device_map()

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is not None and value < least:
            raise ValueError(f"{flag(name)} must be >= {least}, got {value}")

    def _is_positive(self, name: str) -> None:
        value = getattr(self, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{flag(name)} must be a finite number > 0, got {value}")

    def _refuse_axes_beside_device_map(self) -> None:
        for name in _AXES:
            if getattr(self, name) > 1:  # an fsdp_size of 0 shares nothing where there is one process
                raise ValueError(
                    f"device-map {self.device_map} places the target in one process, but {flag(name)} is "
                    f"{getattr(self, name)}: give one of the two"
                )

    @property
    def batch_limit(self) -> BatchLimit:
        """What bounds a batch: ``batch_tokens`` where that is given, else ``batch_size``."""
        from dspark_store.target.batches import PaddedTokens

        return self.batch_size if self.batch_tokens is None else PaddedTokens(self.batch_tokens)

    @property
    def resolved_device(self) -> torch.device:
        """The device to run on; ValueError when there is none of that name.

        Nothing is allocated on a CUDA device, which may be another rank's: see ``rank_device``.
        """
        from dspark_store.target.device import device_named

        return device_named(self.device)

    @property
    def resolved_backend(self) -> str:
        """The torch.distributed backend; ValueError for nccl where the target does not run on CUDA."""
        device = self.resolved_device.type
        if self.backend == "nccl" and device != "cuda":
            raise ValueError(f"backend nccl moves tensors between CUDA devices, and the device is {device}: use gloo")
        return self.backend or ("nccl" if device == "cuda" else "gloo")

    def resolved_fsdp_size(self, model_type: str, world_size: int) -> int:
        """Ranks that share one copy of a target of this type by FSDP2, in a job of ``world_size`` ranks.

        ``fsdp_size`` 0 follows NeMo Automodel's precompute: the types that it shards use all ranks that tensor and
        expert parallelism leave, and any other target is replicated. So is a pipeline, whose stages hold the shards.
        """
        if self.fsdp_size:
            return self.fsdp_size
        if self.pp_size > 1 or model_type not in SHARDED_MODEL_TYPES:
            return 1
        return max(1, world_size // (self.tp_size * self.ep_size))

    @property
    def resolved_encode_threads(self) -> int:
        """Encoder threads to start."""
        return self.encode_threads or min(8, os.cpu_count() or 1)


def settings() -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of PrecomputeConfig that a flag or a file sets, by name."""
    return settings_of(PrecomputeConfig)


def config_from(values: Mapping[str, Any]) -> PrecomputeConfig:
    """Build the settings from plain values, converting each to its setting's type.

    ValueError as `fill_settings`, and where two settings exclude one another.
    """
    if values.get("batch_tokens") is not None and values.get("batch_size") is not None:
        raise ValueError(
            f"batch-tokens {values['batch_tokens']} and batch-size {values['batch_size']} both bound a batch: give one "
            "of the two"
        )
    return fill_settings(PrecomputeConfig, values)
