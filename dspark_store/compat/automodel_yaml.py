"""Configurations of NeMo Automodel's distributed precompute, read as settings of ours.

Such a file is a training recipe: ``recipe_args`` says what to capture, ``distributed`` over how many ranks,
``dist_env`` with which backend, and much of the rest is about training a draft. The names of the keys are those that
its recipes ``precompute_dspark_dist`` and ``train_dspark`` read in August 2026; a null is the same as an absent key.

What differs from Automodel:

- tp_size, pp_size and ep_size hold for every target. Automodel refuses the first two, and uses the third only for the
  types in ``SHARDED_MODEL_TYPES``.
- ``strategy`` says what it says there: with fsdp2 those types are sharded over all ranks and every other target is
  replicated (``fsdp_size`` 0), with ddp all are replicated.
- cp_size, dp_size and dp_replicate_size have no meaning: no sequence is split, and copies follow from the other sizes.
- A rerun goes on where the last one stopped, where Automodel computes all again.

Rows and their order are Automodel's (``order``), unless the store was begun in our own order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from dspark_store.format.dtypes import CACHE_DTYPES
from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.metadata import has_store, read_record
from dspark_store.format.storage import LocalStorage
from dspark_store.precompute.settings import settings
from dspark_store.settings import convert_setting, flag, nearest

_OUTPUT = "cache_output_dir"
_SAME_NAMES = (
    *("seq_length", "num_workers", "shuffle_seed", "mask_reasoning_content", "chat_template", "target_layer_ids"),
    *("draft_num_hidden_layers", "target_num_hidden_layers", "target_attn_implementation", "target_force_hf"),
    "mask_generation_prompt",
    "trust_remote_code",
)
_SETTINGS_OF_RECIPE = {
    "target_model_name_or_path": "target_model",
    "train_data_path": "input_data",
    _OUTPUT: "output_dir",
    "cache_dtype": "dtype",
    "cache_shard_size": "shard_size",
    "micro_batch_size": "batch_size",
    "train_split": "split",
    **{name: name for name in _SAME_NAMES},
}
_SETTINGS_OF_AXES = {"tp_size": "tp_size", "pp_size": "pp_size", "ep_size": "ep_size"}
_SETTINGS_OF_ENVIRONMENT = {"backend": "backend", "timeout_minutes": "timeout_minutes"}
_REQUIRED = ("target_model_name_or_path", "train_data_path", "seq_length")
_DEFAULTS = {"resume": True, "batch_size": 1, "shard_size": 256, "order": "automodel"}
_FSDP_SIZE_OF_STRATEGY = {"fsdp2": 0, "megatron_fsdp": 0, "mfsdp": 0, "ddp": 1}

# It would change what is stored, and is not done here: to ignore it would give another store than was asked for.
_UNSUPPORTED = frozenset({"multimodal"})

_MEANINGLESS_BLOCKS = frozenset(
    {"recipe", "optimizer", "lr_scheduler", "checkpoint", "wandb", "fp8", "compile", "peft", "dataset", "val_dataset"}
)
_MEANINGLESS_IN_RECIPE = frozenset(
    # the kernels and the placement of the target
    {"target_attn_backend", "target_dispatcher", "target_experts", "target_enable_fsdp_optimizations"}
    | {"shard_dense_target"}
    # the draft
    | {"block_size", "num_anchors", "mask_token_id", "freeze_embeddings", "attention_backend", "markov_rank"}
    | {"markov_head_type", "confidence_head_alpha", "confidence_head_with_markov"}
    # its training
    | {"ce_loss_alpha", "l1_loss_alpha", "loss_decay_gamma", "num_epochs", "grad_accumulation_steps", "max_grad_norm"}
    | {"log_every_steps", "ckpt_every_steps", "save_checkpoint_every_epoch", "output_dir", "cached_target_path"}
    | {"val_data_path", "val_split", "packed_sequence_size"}
)
_MEANINGLESS_IN_DISTRIBUTED = frozenset(
    {"moe", "pipeline", "mp_policy", "offload_policy", "autocast_dtype", "multimodal"}
    | {"_target_", "_recursive_", "_convert_"}
    # of fsdp2
    | {"activation_checkpointing", "activation_checkpointing_scope", "defer_fsdp_grad_sync", "reshard_after_forward"}
    | {"sequence_parallel", "tp_plan", "patch_is_packed_sequence", "enable_async_tensor_parallel", "enable_compile"}
    | {"enable_fsdp2_prefetch", "fsdp2_backward_prefetch_depth", "fsdp2_forward_prefetch_depth"}
    # of megatron_fsdp
    | {"megatron_fsdp_unit_modules", "zero_dp_strategy", "init_fsdp_with_meta_device", "grad_reduce_in_fp32"}
    | {"preserve_fp32_weights", "overlap_grad_reduce", "overlap_param_gather", "check_for_nan_in_grad"}
    | {"report_nan_in_param_grad", "average_in_collective", "disable_bucketing", "calculate_per_token_loss"}
    | {"keep_fp8_transpose_cache", "nccl_ub", "fsdp_double_buffer"}
    # of ddp
    | {"broadcast_buffers", "find_unused_parameters", "static_graph", "bucket_cap_mb", "gradient_as_bucket_view"}
)
_UNUSED_SIZES = frozenset({"cp_size", "dp_size", "dp_replicate_size"})


def settings_of(document: Mapping[str, Any], flags: Collection[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """Return the settings that a configuration of NeMo Automodel gives, and what its user is to be told, a line each.

    ``flags`` names the settings that are given elsewhere and win: the file need not have them. ValueError for a key
    that Automodel does not know, a value that cannot be, and a required key that is missing.
    """
    recipe, distributed = _block(document, "recipe_args"), _block(document, "distributed")
    environment = _block(document, "dist_env")
    in_vain = [
        *_named_in_vain("", document, {"recipe_args", "distributed", "dist_env"}, _MEANINGLESS_BLOCKS),
        *_named_in_vain("dist_env.", environment, _SETTINGS_OF_ENVIRONMENT, frozenset()),
        *_named_in_vain(
            "distributed.", distributed, {"strategy", *_SETTINGS_OF_AXES}, _MEANINGLESS_IN_DISTRIBUTED | _UNUSED_SIZES
        ),
        *_named_in_vain("recipe_args.", recipe, {*_SETTINGS_OF_RECIPE, *_UNSUPPORTED}, _MEANINGLESS_IN_RECIPE),
    ]
    values = {
        **_DEFAULTS,
        "fsdp_size": _fsdp_size(distributed),
        **_converted("recipe_args.", recipe, _SETTINGS_OF_RECIPE),
        **_converted("distributed.", distributed, _SETTINGS_OF_AXES),
        **_converted("dist_env.", environment, _SETTINGS_OF_ENVIRONMENT),
    }
    _check_recipe(recipe, values, flags)
    notes = [f"accepted, and without meaning for a precompute: {', '.join(in_vain)}"] if in_vain else []
    if values.get("backend") == "nccl":
        del values["backend"]  # ours is nccl where the target runs on CUDA, else gloo
        if "backend" not in flags and not torch.cuda.is_available():
            notes.append("dist_env.backend nccl needs CUDA, and torch sees no CUDA device: gloo takes its place")
    return values, notes


def has_own_order(storage: LocalStorage) -> bool:
    """Tell whether there is a store whose source reads rows in our own order, so that it must be gone on with so."""
    if not has_store(storage):
        return False
    source = read_record(storage).manifest.get("source")
    return source is not None and not _names_order(source)


def _names_order(source: JsonValue) -> bool:
    """Tell whether a source's identity, or that of a part of a blend, names an order."""
    if not isinstance(source, Mapping):
        return False
    parts = source.get("parts")
    return "order" in source or (isinstance(parts, list) and any(map(_names_order, parts)))


def _block(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    block = {} if document.get(name) is None else document[name]
    if not isinstance(block, dict):
        raise ValueError(f"{name} must be a mapping of keys, not {type(block).__name__}")
    return {str(key): value for key, value in block.items()}


def _named_in_vain(
    prefix: str, block: Mapping[str, Any], understood: Collection[str], meaningless: frozenset[str]
) -> list[str]:
    """Return the keys of a block that are known and have no meaning here; ValueError for one that is not known."""
    for key in block:
        if key in understood or key in meaningless:
            continue
        if not prefix and key in settings():
            raise ValueError(f"{key!r} cannot stand beside recipe_args: give it as the flag --{flag(key)}")
        near = nearest(key, {*understood, *meaningless})
        raise ValueError(f"unknown key '{prefix}{key}'; the nearest known one is '{prefix}{near}'")
    in_vain = {key: value for key, value in block.items() if key in meaningless and value is not None}
    return [f"{prefix}{key}" for key, value in in_vain.items() if not (key in _UNUSED_SIZES and value == 1)]


def _converted(prefix: str, block: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that the keys of a block give."""
    known = settings()
    given = {key: name for key, name in names.items() if block.get(key) is not None}
    return {name: convert_setting(known[name], block[key], f"{prefix}{key}") for key, name in given.items()}


def _fsdp_size(distributed: Mapping[str, Any]) -> int:
    strategy = str(distributed.get("strategy") or "fsdp2").lower().replace("-", "_")
    if strategy not in _FSDP_SIZE_OF_STRATEGY:
        raise ValueError(
            f"distributed.strategy must be one of {', '.join(_FSDP_SIZE_OF_STRATEGY)}, got {distributed['strategy']!r}"
        )
    return _FSDP_SIZE_OF_STRATEGY[strategy]


def _check_recipe(recipe: Mapping[str, Any], values: Mapping[str, Any], flags: Collection[str]) -> None:
    """Raise ValueError for what Automodel itself refuses, by Automodel's names, and for what cannot be done here."""
    if not recipe.get(_OUTPUT) and "output_dir" not in flags:
        raise ValueError(f"recipe_args.{_OUTPUT} is required: the directory of the store (or give --output-dir)")
    if "dtype" not in flags and values.get("dtype", "bf16") not in CACHE_DTYPES:
        raise ValueError(f"recipe_args.cache_dtype must be one of {', '.join(CACHE_DTYPES)}, got {values['dtype']!r}")
    if not {"shard_size", "batch_size", "batch_tokens"} & set(flags):
        _check_sizes(values["shard_size"], values["batch_size"])
    for key in _REQUIRED:
        name = _SETTINGS_OF_RECIPE[key]
        if recipe.get(key) is None and name not in flags:
            raise ValueError(f"recipe_args.{key} is required (or give --{flag(name)})")
    for key in sorted(_UNSUPPORTED):
        if recipe.get(key):
            raise ValueError(f"recipe_args.{key} is not supported: the store would not be the one that it asks for")


def _check_sizes(shard_size: int, batch_size: int) -> None:
    for key, size in (("micro_batch_size", batch_size), ("cache_shard_size", shard_size)):
        if size < 1:
            raise ValueError(f"recipe_args.{key} must be >= 1, got {size}")
    if shard_size % batch_size:
        raise ValueError(
            f"recipe_args.cache_shard_size {shard_size} must be a multiple of micro_batch_size {batch_size}"
        )
