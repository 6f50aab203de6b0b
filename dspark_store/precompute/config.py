"""The job's settings: one frozen dataclass, filled from flags or YAML by the same code."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml

from dspark_store.format.codecs import CODEC_PRESETS
from dspark_store.format.dtypes import CACHE_DTYPES

_COMPUTE_DTYPES = ("auto", "bf16", "fp16", "fp32")
_NONFINITE = ("mark", "error")
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def _setting(help: str, default: Any = dataclasses.MISSING, **options: Any) -> Any:  # noqa: A002 - argparse's name
    return field(default=default, metadata={"help": help, **options})


def _shuffle_seed(text: str | int | None) -> int | None:
    if text is None or str(text).lower() == "none":
        return None
    return _whole_number(text)


def _whole_number(value: Any) -> int:
    if isinstance(value, bool | float):
        raise TypeError
    return int(value)


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _holds_tensors(device: torch.device) -> bool:
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        return False
    return device.type != "meta"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecomputeConfig:
    """Everything a precompute is told. The names are the flags' names with underscores."""

    target_model: str = _setting("the target: a hub id, a directory, or a .gguf file")
    input_data: str = _setting("JSONL of conversations with OpenAI-style messages")
    output_dir: str = _setting("where the store is written")
    seq_length: int = _setting("S, the most tokens a sample has; longer conversations are truncated", 2048)
    batch_size: int = _setting("samples a forward", 4)
    shard_size: int = _setting("R, the samples of a shard, which is the unit of commit and resume", 256)
    dtype: str = _setting("dtype of the stored states", "bf16", choices=tuple(CACHE_DTYPES))
    device: str = _setting("where the target runs: cuda where there is one, else cpu", "", metavar="DEVICE")
    num_workers: int = _setting("processes that tokenise; 0 tokenises in this one", 0)
    split: str | None = _setting("a slice of the rows, name[a:b], taken after the shuffle", None)
    shuffle_seed: int | None = _setting(
        "seed of the order of rows; none keeps the file's order", 42, type=_shuffle_seed
    )
    draft_num_hidden_layers: int = _setting("layers to capture when --target-layer-ids is not given", 5)
    target_layer_ids: tuple[int, ...] = _setting("layers to capture: -1 is the embedding", (), nargs="+", type=int)
    chat_template: str | None = _setting("a chat template, inline Jinja or a file", None)
    mask_reasoning_content: bool = _setting("do not supervise reasoning_content", False)
    target_force_hf: bool = _setting("accepted for compatibility: every target loads through transformers", False)
    trust_remote_code: bool = _setting("let the target's repository run its own code", False)
    resume: bool = _setting("go on with the store in --output-dir, doing the shards it lacks", False)
    target_attn_implementation: str | None = _setting("attention of the target: eager, sdpa, ...", None)
    log_level: str = _setting("least level of log messages", "INFO", choices=_LOG_LEVELS)
    compute_dtype: str = _setting(
        "dtype that the target computes in; auto is bf16 on CUDA, else fp32", "auto", choices=_COMPUTE_DTYPES
    )
    codec: str = _setting("how states are compressed", "default", choices=CODEC_PRESETS)
    chunk_tokens: int = _setting("tokens a chunk; 0 chooses by hidden size and codec", 0)
    max_samples: int | None = _setting("take at most this many rows, after shuffle and split", None, type=int)
    on_nonfinite: str = _setting(
        "mark samples whose states are not finite in the cache dtype, or stop", "mark", choices=_NONFINITE
    )
    encode_threads: int = _setting("threads that compress; 0 is one a core, at most 8", 0)
    write_buffer_bytes: int = _setting("bytes of states that may wait for the encoders", 512 * 1024 * 1024)
    estimate: bool = _setting("print tokens, bytes and hours to come, and stop before the target is loaded", False)
    tokens_per_second: float | None = _setting("rate of the target that --estimate reckons with", None, type=float)
    smoke: int = _setting("first run this many samples into a temporary store and check it", 0, metavar="N")

    def check(self) -> None:
        """Raise ValueError naming the first setting that cannot be."""
        for name in ("batch_size", "shard_size", "seq_length", "draft_num_hidden_layers", "write_buffer_bytes"):
            self._at_least(name, 1)
        for name in ("num_workers", "chunk_tokens", "encode_threads", "smoke"):
            self._at_least(name, 0)
        if self.max_samples is not None:
            self._at_least("max_samples", 1)
        if self.tokens_per_second is not None and self.tokens_per_second <= 0:
            raise ValueError(f"tokens-per-second must be > 0, got {self.tokens_per_second}")
        if self.shard_size % self.batch_size:
            raise ValueError(f"shard-size {self.shard_size} is not a multiple of batch-size {self.batch_size}")
        for setting in fields(self):
            choices = setting.metadata.get("choices")
            if choices and getattr(self, setting.name) not in choices:
                raise ValueError(
                    f"{_flag(setting.name)} must be one of {', '.join(choices)}, got {getattr(self, setting.name)!r}"
                )

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value < least:
            raise ValueError(f"{_flag(name)} must be >= {least}, got {value}")

    @property
    def resolved_device(self) -> torch.device:
        """The device to run on; ValueError when there is none of that name."""
        name = self.device or _default_device()
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise ValueError(f"device {name!r} is unknown: expected cpu, cuda or cuda:N") from error
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device {name!r} is not there: torch sees no CUDA device; use --device cpu")
        if not _holds_tensors(device):
            raise ValueError(f"device {name!r} is not there: torch cannot make a tensor on it; use --device cpu")
        return device

    @property
    def resolved_encode_threads(self) -> int:
        """Encoder threads to start."""
        return self.encode_threads or min(8, os.cpu_count() or 1)


def parse_arguments(arguments: Sequence[str]) -> PrecomputeConfig:
    """Fill the settings from flags, and from the YAML file that ``-c`` names; a flag wins over the file.

    ValueError for an unknown key in the file (with the nearest known one) or a required setting that is missing.
    """
    given = vars(_parser().parse_args(arguments))
    path = given.pop("config")
    values: dict[str, Any] = dict(_read_yaml(Path(path))) if path else {}
    values |= {name: value for name, value in given.items() if value is not None}
    return config_from(values)


def config_from(values: Mapping[str, Any]) -> PrecomputeConfig:
    """Build the settings from plain values, converting each to its setting's type."""
    known = {setting.name: setting for setting in fields(PrecomputeConfig)}
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, cutoff=0.0)
            raise ValueError(f"unknown setting {name!r}; the nearest known one is {near[0]!r}")
    missing = [name for name in known if known[name].default is dataclasses.MISSING and values.get(name) is None]
    if missing:
        raise ValueError(f"required but not given: {', '.join('--' + _flag(name) for name in missing)}")
    return PrecomputeConfig(**{name: _convert(known[name], value) for name, value in values.items()})


def _convert(setting: dataclasses.Field[Any], value: Any) -> Any:
    """Convert a value from YAML or a flag; ValueError naming the setting when it is of another kind."""
    if value is None and setting.default is not dataclasses.MISSING:
        return None if setting.default is None or setting.name == "shuffle_seed" else setting.default
    try:
        if setting.metadata.get("nargs"):
            return tuple(_whole_number(item) for item in (value if isinstance(value, list | tuple) else [value]))
        if isinstance(setting.default, bool):
            if not isinstance(value, bool):
                raise TypeError
            return value
        if isinstance(value, bool | list | dict):
            raise TypeError
        convert = setting.metadata.get("type") or _kind(setting.default)
        return _whole_number(value) if convert is int else convert(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"setting {setting.name!r} cannot be {value!r}") from error


def _kind(default: object) -> Callable[[Any], Any]:
    return type(default) if isinstance(default, int | float) else str


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        values = yaml.safe_load(path.read_text())
    except FileNotFoundError as error:
        raise FileNotFoundError(f"configuration file {path} does not exist") from error
    except yaml.YAMLError as error:
        raise ValueError(f"configuration file {path} is not YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"configuration file {path} must be a mapping of settings, not {type(values).__name__}")
    return {str(name).replace("-", "_"): value for name, value in values.items()}


def _flag(name: str) -> str:
    return name.replace("_", "-")


class _OneLineParser(argparse.ArgumentParser):
    """Raises instead of printing the usage: user mistakes end the command with one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="python -m dspark_store.precompute",
        description="Run a frozen target once over a corpus and write its hidden states as a Zarr store.",
    )
    parser.add_argument("-c", "--config", help="YAML file with these settings (underscores or dashes); flags win")
    for setting in fields(PrecomputeConfig):
        metadata = dict(setting.metadata)
        text = metadata.pop("help")
        if isinstance(setting.default, bool):
            parser.add_argument(f"--{_flag(setting.name)}", action="store_true", default=None, help=text)
            continue
        if setting.default not in (dataclasses.MISSING, None, "", ()):
            text += f" (default: {setting.default})"
        if setting.name == "shuffle_seed":
            metadata["type"] = str
        metadata.setdefault("type", _kind(setting.default))
        parser.add_argument(f"--{_flag(setting.name)}", default=None, help=text, **metadata)
    return parser
