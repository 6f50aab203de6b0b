"""A trained draft on trial: tokens per step of the target, over prompts of a store."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from dspark_store.evaluation.decoder import Decoder
from dspark_store.evaluation.judgement import Judgement, judge, judge_sampled, prompts_of
from dspark_store.evaluation.sampling import Sampler
from dspark_store.evaluation.settings import EvaluateConfig
from dspark_store.progress import start_progress
from dspark_store.readers.cache import Cache, open_cache
from dspark_store.readers.choice import Split, choose_samples
from dspark_store.target.device import device_named, resolve_compute_dtype
from dspark_store.target.fingerprint import target_fingerprint
from dspark_store.target.load import load_target
from dspark_store.target.source import TargetSource
from dspark_store.training.checkpoint import (
    CHECKPOINTS,
    DRAFT,
    STATE,
    check_checkpoint,
    checkpoints,
    load_draft,
    read_state,
)
from dspark_store.training.data import ExpectedStore, check_manifest, target_tables
from dspark_store.training.state import TrainingState

_log = logging.getLogger(__name__)


def evaluate(config: EvaluateConfig) -> Judgement:
    """Decode the prompts with the draft, greedily also without it, and return what came of it.

    ValueError, OSError or ImportError for what a user can get wrong.
    """
    config.check()
    Sampler(config.temperature, config.seed)  # refuses what cannot be
    found = checkpoints(Path(config.draft) / CHECKPOINTS)
    if not found:
        raise FileNotFoundError(f"{config.draft} has no checkpoint: give the --output-dir of a training")
    check_checkpoint(found[-1], (DRAFT, STATE))
    trained = read_state(found[-1])
    cache = open_cache(config.store)
    source = TargetSource(config.target_model, config.trust_remote_code)
    _refuse_strangers(trained, cache, source)
    prompts = list(prompts_of(cache, _samples(cache, trained.config, config.samples)))
    if not prompts:
        raise ValueError(f"there are no prompts: every sample of {config.store} begins with a supervised token")
    device = device_named(config.device)
    dtype = resolve_compute_dtype(config.dtype, device)
    model = load_target(source, dtype=dtype, device=device)
    draft = load_draft(found[-1], *target_tables(cache, device, dtype))
    decoder, total = Decoder(model, trained.layers), Judgement()
    what = (decoder, draft, prompts, config.max_new_tokens, _stops(model))
    judged = judge_sampled(*what, config.temperature, config.seed) if config.temperature else judge(*what)
    with start_progress("evaluate", len(prompts), "prompts") as progress:
        for one in judged:
            total += one
            progress.advance(1, f"{total.tokens_per_step:.2f} tokens per step")
    return total


def _refuse_strangers(trained: TrainingState, cache: Cache, source: TargetSource) -> None:
    """Raise ValueError unless draft, store and target are of the same target, as far as can be told before loading it.

    Other files of the target's weights are but a warning: they may be the same weights in another format.
    """
    check_manifest(cache.manifest, ExpectedStore.of_target(source, layers=trained.layers))
    stored = cache.manifest.get("target_weights")
    if trained.origin.target_weights != stored:
        raise ValueError(
            f"the draft was trained on a target with weights {trained.origin.target_weights}, the store is of one with "
            f"{stored}: give the store that it was trained from, or another of the same target"
        )
    own = target_fingerprint(source)["weights"]
    if own != stored:
        _log.warning("the store was made from other files than %s has: other weights, or another format", source.model)


def _samples(cache: Cache, config: Mapping[str, Any], count: int) -> list[int]:
    """Return the first samples that the training kept for validation; of all samples, where it kept none."""
    fraction = config.get("validation_fraction", 0.0)
    if not fraction:
        _log.warning("the training kept no samples for validation: these prompts are of samples that it has seen")
    split = Split("validation", fraction, 0) if fraction else None
    return [int(sample) for sample in choose_samples(cache, min_supervised=2, split=split)[:count]]


def _stops(model: PreTrainedModel) -> frozenset[int]:
    """Return the tokens that end the target's texts."""
    configs = (model.generation_config, model.config)
    ends = next((config.eos_token_id for config in configs if getattr(config, "eos_token_id", None) is not None), None)
    return frozenset() if ends is None else frozenset(ends if isinstance(ends, list) else [ends])
