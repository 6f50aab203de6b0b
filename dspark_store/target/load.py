"""Loading the target through transformers: configuration, tokenizer, weights."""

import importlib.util
import logging
from collections.abc import Mapping
from copy import deepcopy
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from dspark_store.target.layers import cut_target_config
from dspark_store.target.parallel import SHARES_SINCE, is_transformers
from dspark_store.target.source import Location, TargetSource, locate, one_line_errors

logger = logging.getLogger(__name__)

_REFUSED_MODEL_TYPES = frozenset({"minimax_m3_vl"})
_ROPE_DIM = "qk_rope_head_dim"
_ROPE_DIM_OVERWRITTEN = frozenset({"glm_moe_dsa"})
_NAMES_SHOWN = 5


def refuse_unsupported_model_type(model_type: str) -> None:
    """Raise ValueError for a target whose states cannot be captured."""
    if model_type in _REFUSED_MODEL_TYPES:
        raise ValueError(
            f"model_type={model_type!r} is not supported: it is a multimodal model without a causal language model "
            "class for its text part; give a text-only target"
        )


def language_model_class(config: PretrainedConfig) -> type[AutoModelForCausalLM | AutoModelForMultimodalLM]:
    """Return the class that builds the model of `config` with its language model head.

    Where transformers has no causal language model for it, that is one which takes text beside images or sound.

    Raises ValueError when there is none.
    """
    for auto_class, mapping in (
        (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
        (AutoModelForMultimodalLM, MODEL_FOR_MULTIMODAL_LM_MAPPING),
    ):
        if type(config) in mapping or auto_class.__name__ in getattr(config, "auto_map", {}):
            if auto_class is AutoModelForMultimodalLM and config.is_encoder_decoder:
                break
            return auto_class
    lacks = "decoder that runs without an encoder" if config.is_encoder_decoder else "language model head"
    raise ValueError(f"model_type={config.model_type!r} is not supported: transformers has no {lacks} for it")


def read_model_type(source: TargetSource) -> str:
    """Read the `model_type` from the raw configuration, empty when it has none.

    Raises ValueError when the model cannot be found or its configuration not read.
    """
    return str(_config_fields(source).get("model_type", ""))


def load_target_config(source: TargetSource) -> PretrainedConfig:
    """Load the configuration, without weights; see also `restore_rope_dim`.

    Raises ValueError, in one line that names the model, when it is unknown or unsupported.
    """
    fields = _config_fields(source)
    refuse_unsupported_model_type(str(fields.get("model_type", "")))
    location = locate(source)
    with one_line_errors(source, "configuration"):
        if location.gguf_file is not None:  # reading the header once more would take seconds
            config: PretrainedConfig = AutoConfig.for_model(**fields)
        else:
            config = AutoConfig.from_pretrained(location.name, trust_remote_code=source.trust_remote_code)
        language_model_class(config)
    restore_rope_dim(config, fields)
    return config


def restore_rope_dim(config: PretrainedConfig, fields: Mapping[str, Any]) -> None:
    """Give a GLM configuration the `qk_rope_head_dim` of its raw `fields`, in place.

    Versions of transformers whose attribute map makes one attribute of `head_dim` and `qk_rope_head_dim` keep
    whichever the file names last. NeMo Automodel repairs GLM-5.2 so; where the value is right this changes nothing.
    """
    raw = fields.get(_ROPE_DIM)
    if config.model_type not in _ROPE_DIM_OVERWRITTEN or raw is None or raw == getattr(config, _ROPE_DIM, None):
        return
    setattr(config, _ROPE_DIM, raw)
    config.qk_head_dim = config.qk_nope_head_dim + raw


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part of `config` that describes the language model; `config` itself for a text-only target."""
    return config.get_text_config(decoder=True)


def load_tokenizer(source: TargetSource) -> PreTrainedTokenizerBase:
    """Load the target's tokenizer.

    Raises ValueError, in one line that names the model, when it has none.
    """
    location = locate(source)
    with one_line_errors(source, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            location.name, trust_remote_code=source.trust_remote_code, **_gguf_argument(location)
        )
    return cast(PreTrainedTokenizerBase, tokenizer)


def load_target(
    source: TargetSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attn_implementation: str | None = None,
    num_layers: int | None = None,
    device_map: str | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    offload_folder: str | PathLike[str] | None = None,
) -> PreTrainedModel:
    """Load the target with its language model head, frozen and in eval mode.

    The weights are read as `dtype`; buffers such as `inv_freq` stay float32, which a cast of the loaded model would
    round. GGUF blocks are unpacked to `dtype`. `attn_implementation` is a name that transformers knows (eager, sdpa,
    flash_attention_2, ...), None for its choice. `num_layers` cuts the target to its first layers, and only their
    weights are read; see `cut_target_config`.

    With a `device_map`, such as "auto", accelerate spreads the weights over the devices, the host's memory and the
    disk, `device` is not looked at, and inputs belong on `input_device`. `max_memory` bounds it by device ("cpu" is the
    host); weights that are not kept as the checkpoint has them go to `offload_folder` when they go to disk.

    Raises ValueError, in one line that names the model, when it is unknown or unsupported, does not offer the attention
    implementation, or when a weight is absent from the checkpoint or has another shape; and ImportError when a device
    map is given without accelerate.
    """
    config = load_target_config(source)
    if num_layers is not None:
        depth = text_config(config).num_hidden_layers
        config = cut_target_config(config, num_layers)
        if num_layers < depth:
            logger.warning("loading only the first %d of the target's %d layers (a diagnostic cut)", num_layers, depth)
    location = locate(source)
    placement = direct_placement(device) if device_map is None else _mapped(device_map, max_memory, offload_folder)
    target = read_weights(
        source,
        language_model_class(config),
        config,
        dtype,
        attn_implementation,
        {
            "trust_remote_code": source.trust_remote_code,
            **_gguf_argument(location),
            **_gguf_unpacked(location),
            **placement,
        },
    )
    if device_map is not None and not is_transformers(SHARES_SINCE) and input_device(target).type == "meta":
        raise ValueError(
            f"device_map {device_map!r} puts layers on the disk, which needs transformers {SHARES_SINCE} or newer: "
            "install a newer one, or give the target more memory"
        )
    if not placement:
        target.to(device)  # type: ignore[arg-type]  # transformers wraps Module.to without its overloads
    return target


def read_weights(
    source: TargetSource,
    model_class: type[AutoModelForCausalLM | AutoModelForMultimodalLM | PreTrainedModel],
    config: PretrainedConfig,
    dtype: torch.dtype,
    attn_implementation: str | None,
    options: Mapping[str, Any],
) -> PreTrainedModel:
    """Let transformers read the weights of a `model_class`, with its own `options`; frozen and in eval mode.

    Raises ValueError, in one line that names the model, as `load_target` does.
    """
    attention: dict[str, Any] = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    what = "weights" if attn_implementation is None else f"weights (attention {attn_implementation!r})"
    with one_line_errors(source, what):
        loaded = model_class.from_pretrained(
            locate(source).name,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, all of them by name
            **attention,
            **options,
        )
    target, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    _refuse_unloaded_weights(source, info)
    target.eval()  # type: ignore[no-untyped-call]  # untyped in transformers
    target.requires_grad_(False)
    return target


def input_device(target: PreTrainedModel) -> torch.device:
    """The device on which the target's embedding runs, and to which inputs go; not where offloaded weights lie."""
    embedding = target.get_input_embeddings()
    hook = getattr(embedding, "_hf_hook", None)  # accelerate's, on the modules that a device map placed
    device = getattr(hook, "execution_device", None)
    return cast(torch.Tensor, embedding.weight).device if device is None else torch.device(device)


def _has_accelerate() -> bool:
    return importlib.util.find_spec("accelerate") is not None


def require_accelerate(what: str) -> None:
    """Raise ImportError saying that `what` needs accelerate, and how to install it, where it is not installed."""
    if not _has_accelerate():
        raise ImportError(f"{what} needs accelerate, not installed: pip install 'dspark-store[accelerate]'")


def _config_fields(source: TargetSource) -> dict[str, Any]:
    location = locate(source)
    with one_line_errors(source, "configuration"):
        if location.gguf_file is None:
            return PretrainedConfig.get_config_dict(location.name)[0]
        path = Path(location.name, location.gguf_file)
        state = path.stat()
        return deepcopy(_gguf_config_fields(path, state.st_size, state.st_mtime_ns))


@lru_cache(maxsize=4)
def _gguf_config_fields(path: Path, _size: int, _mtime_ns: int) -> dict[str, Any]:
    """Fields of a GGUF header, kept because a walk over its vocabulary takes seconds; size and time are the key."""
    fields, _ = PretrainedConfig.get_config_dict(str(path.parent), gguf_file=path.name)
    return {name: value for name, value in fields.items() if not name.startswith("_")}


def _gguf_argument(location: Location) -> dict[str, Any]:
    return {} if location.gguf_file is None else {"gguf_file": location.gguf_file}


def _gguf_unpacked(location: Location) -> dict[str, Any]:
    """Ask for plain weights: packed ones need a kernel that not every machine has, and then other bits come out."""
    if location.gguf_file is None or not hasattr(transformers, "GgufConfig"):
        return {}
    return {"quantization_config": transformers.GgufConfig(dequantize=True)}


def direct_placement(device: torch.device) -> dict[str, Any]:
    """Load straight onto an accelerator where accelerate is installed, else by way of host memory."""
    if device.type == "cpu" or not _has_accelerate():
        return {}
    return {"device_map": {"": device}}


def _mapped(
    device_map: str, max_memory: Mapping[int | str, int | str] | None, offload_folder: str | PathLike[str] | None
) -> dict[str, Any]:
    require_accelerate(f"device_map {device_map!r}")
    folder = {} if offload_folder is None else {"offload_folder": str(offload_folder)}
    return {"device_map": device_map, "max_memory": max_memory and dict(max_memory), **folder}


def _refuse_unloaded_weights(source: TargetSource, info: Mapping[str, Any]) -> None:
    """Raise ValueError naming the weights that transformers' loading `info` says are absent or of another shape."""
    missing = sorted(str(name) for name in info["missing_keys"])
    mismatched = sorted(str(entry[0]) if isinstance(entry, tuple) else str(entry) for entry in info["mismatched_keys"])
    if missing:
        raise ValueError(
            f"the checkpoint of model {source.model!r} lacks {_shortened(missing)}, which would start out random: "
            "give a complete checkpoint"
        )
    if mismatched:
        raise ValueError(
            f"the checkpoint of model {source.model!r} holds {_shortened(mismatched)} in another shape than its "
            "configuration says: give a checkpoint that fits"
        )


def _shortened(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
