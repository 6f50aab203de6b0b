"""The job's settings: one frozen dataclass that says what is known, what is the default, and what cannot be."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dspark_store.format.codecs import CODEC_PRESETS
from dspark_store.format.dtypes import CACHE_DTYPES
from dspark_store.format.int8 import AIMS
from dspark_store.settings import check_settings, fill_settings, flag, setting, settings_of, whole_number
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

    target_model: str = setting("target", "the target: a hub id, a directory, or a .gguf file")
    input_data: SpecValue = setting(  # noqa: RUF009 - it makes a field, as all of these do
        "data",
        "files, globs or datasets of conversations, or any other source (docs/sources.md)",
        nargs="+",
        convert=_source,
        expected="a source of tokens: a path, a mapping with a type, or a list",
    )
    output_dir: str = setting("store", "where the store is written")
    seq_length: int = setting(
        "data", "S, the most tokens a sample has; longer conversations are truncated", 2048, least=1
    )
    batch_size: int = setting("target", "B, the samples per forward pass", 4, least=1)
    batch_tokens: int | None = setting(
        "target",
        "instead of --batch-size: most tokens per forward pass, padding included; a longer sample runs alone",
        None,
        metavar="N",
        least=1,
    )
    shard_size: int = setting(
        "store", "R, the samples of a shard, which is the unit of commit and resume", 256, least=1
    )
    dtype: str = setting(
        "store",
        "dtype of the stored states; int8 and int8-small are lossy, a half and two fifths of bf16's bytes",
        "bf16",
        choices=(*CACHE_DTYPES, *AIMS),
    )
    mantissa_bits: int | None = setting(
        "store",
        "lossy: round bf16 states to so many of their 7 mantissa bits, 1 to 6",
        None,
        type=int,
        metavar="N",
        least=1,
    )
    device: str = setting("target", "where the target runs: cuda where there is one, else cpu", "", metavar="DEVICE")
    num_workers: int = setting("data", "processes that tokenise; 0 tokenises in this one", 0, least=0)
    split: str | None = setting("data", "a slice of the rows, name[a:b], taken after the shuffle", None)
    shuffle_seed: int | None = setting(
        "data",
        "seed of the order of rows; none keeps the file's order",
        42,
        type=str,
        convert=_shuffle_seed,
        expected="a whole number or none",
        nullable=True,
    )
    draft_num_hidden_layers: int = setting(
        "target", "layers to capture when --target-layer-ids is not given", 5, least=1
    )
    target_layer_ids: tuple[int, ...] = setting(
        "target",
        "layers to capture: id i is hidden_states[i + 1] of transformers, the output of decoder layer i, the last one "
        "after the final norm; -1 is the embedding; vLLM counts one more",
        (),
        nargs="+",
    )
    chat_template: str | None = setting("data", "a chat template, inline Jinja or a file", None)
    target_force_hf: bool = setting(
        "target", "accepted for compatibility: every target loads through transformers", False
    )
    trust_remote_code: bool = setting("target", "let the target's repository run its own code", False)
    resume: bool = setting("recovery", "capture only the missing shards of the store in --output-dir", False)
    target_attn_implementation: str | None = setting("target", "attention of the target: eager, sdpa, ...", None)
    log_level: str = setting("advanced", "least level of log messages", "INFO", choices=_LOG_LEVELS)
    compute_dtype: str = setting(
        "target",
        "dtype that the target computes in; auto is bf16 on CUDA, else fp32",
        "auto",
        choices=("auto", *CACHE_DTYPES),
    )
    codec: str = setting("store", "how states are compressed", "default", choices=CODEC_PRESETS)
    chunk_tokens: int = setting("store", "tokens per chunk; 0 chooses by hidden size and codec", 0, least=0)
    max_samples: int | None = setting("data", "take at most this many rows, after shuffle and split", None, least=1)
    on_nonfinite: str = setting(
        "store", "mark samples whose states are not finite in the cache dtype, or stop", "mark", choices=_NONFINITE
    )
    encode_threads: int = setting("advanced", "threads that compress; 0 is one per core, at most 8", 0, least=0)
    write_buffer_bytes: int = setting(
        "advanced", "bytes of states that may wait for the encoders", 512 * 1024 * 1024, least=1
    )
    estimate: bool = setting(
        "advanced", "print tokens, bytes and hours to come, and stop before the target is loaded", False
    )
    tokens_per_second: float | None = setting(
        "advanced", "rate of the target that --estimate reckons with", None, positive=True
    )
    smoke: int = setting(
        "advanced", "first run this many samples into a temporary store and check it", 0, metavar="N", least=0
    )
    fsdp_size: int = setting(
        "ranks", "ranks that share one copy of the target by FSDP2; 0 shards where Automodel does", 1, least=0
    )
    tp_size: int = setting("ranks", "ranks that share one copy of the target by tensor parallelism", 1, least=1)
    ep_size: int = setting("ranks", "ranks that share the experts of one copy of the target", 1, least=1)
    pp_size: int = setting(
        "ranks", "ranks that share the layers of one copy of the target, as a pipeline of stages", 1, least=1
    )
    reduce_dtype: str = setting(
        "ranks",
        "how tensor parallelism adds: partial sums in the compute dtype or in fp32; gather adds as one device does",
        "compute",
        choices=REDUCE_DTYPES,
    )
    device_map: str | None = setting(
        "target", "auto spreads the target over the devices and memory of one process", None, choices=("auto",)
    )
    target_num_hidden_layers: int | None = setting(
        "advanced", "diagnosis only: run no more than the first layers of the target", None, metavar="N", least=1
    )
    backend: str = setting("ranks", "torch.distributed backend: nccl on CUDA, else gloo", "", choices=_BACKENDS)
    timeout_minutes: float = setting(
        "ranks", "minutes after which a rank that makes no progress ends the job", 30.0, positive=True
    )
    take_over: bool = setting("recovery", "write to a store that another living job has locked", False)
    mix_equality_classes: bool = setting(
        "recovery", "let workers whose states may differ in the last bits add to a store", False
    )
    profile: bool = setting(
        "advanced", "tell at the end how the time was shared: forward, copy, encode, write, waiting", False
    )
    notes: tuple[str, ...] = field(default=(), compare=False)
    """What the user is to be told about the configuration file, a line each; no setting."""

    def check(self) -> None:
        """Raise ValueError naming the first setting that cannot be."""
        self.check_options()
        check_settings(self)
        if self.batch_tokens is None and self.shard_size % self.batch_size:
            raise ValueError(f"shard-size {self.shard_size} is not a multiple of batch-size {self.batch_size}")
        if self.mantissa_bits is not None and (self.mantissa_bits > 6 or self.dtype != "bf16"):
            asked = f"mantissa-bits {self.mantissa_bits} of dtype {self.dtype}"
            raise ValueError(f"{asked}: only bf16 states are rounded, to 1 to 6 bits")
        for name in _AXES if self.device_map is not None else ():
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
