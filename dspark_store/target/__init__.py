"""The frozen model: which layers are captured, how it is loaded, what is taken from it."""

from dspark_store.target.capture import CapturedStates, StageStates, TargetCapture
from dspark_store.target.facts import head_facts, rebuild_config, target_config_json, target_weights
from dspark_store.target.fingerprint import target_fingerprint
from dspark_store.target.layers import build_target_layer_ids, validate_target_layer_ids
from dspark_store.target.load import (
    load_target,
    load_target_config,
    load_tokenizer,
    read_model_type,
    refuse_unsupported_model_type,
    resolve_compute_dtype,
    text_config,
)
from dspark_store.target.parallel import ParallelPlan, RankPlace
from dspark_store.target.source import TargetSource

__all__ = [
    "CapturedStates",
    "ParallelPlan",
    "RankPlace",
    "StageStates",
    "TargetCapture",
    "TargetSource",
    "build_target_layer_ids",
    "head_facts",
    "load_target",
    "load_target_config",
    "load_tokenizer",
    "read_model_type",
    "rebuild_config",
    "refuse_unsupported_model_type",
    "resolve_compute_dtype",
    "target_config_json",
    "target_fingerprint",
    "target_weights",
    "text_config",
    "validate_target_layer_ids",
]
