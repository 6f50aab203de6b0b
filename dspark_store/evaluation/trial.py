"""A trained draft on trial over prompts of a store: tokens per step, and whether the text is the target's own."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from dspark_store.draft.model import Draft
from dspark_store.evaluation.decoder import Decoder, Greedy, Speculated
from dspark_store.evaluation.sampling import Sampler
from dspark_store.evaluation.settings import EvaluateConfig
from dspark_store.format.schema import IDS, MASK
from dspark_store.progress import start_progress
from dspark_store.readers.cache import Cache, open_cache
from dspark_store.readers.epoch import Split, choose_samples
from dspark_store.settings import check_settings
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
NEAR = {torch.float32: 1e-4, torch.float16: 0.125, torch.bfloat16: 1.0}
"""Logits closer than this may change places with the number of tokens that a forward runs over, by what it runs in.

In half precision that is 128 roundings of a logit between one and two, or eight of one between 16 and 32.
"""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Sums over prompts. ``near_ties`` and ``differing`` count those whose text left the target's own.

    A near tie left it where the target's two best logits were closer than `NEAR` says, any other where they were not.
    """

    prompts: int = 0
    tokens: int = 0
    steps: int = 0
    near_ties: int = 0
    differing: int = 0

    @classmethod
    def of(cls, speculated: Speculated) -> Judgement:
        """Count one prompt's tokens and steps."""
        return cls(prompts=1, tokens=max(0, len(speculated.tokens) - 1), steps=speculated.steps)

    def __add__(self, other: Judgement) -> Judgement:
        return Judgement(*(one + another for one, another in zip(astuple(self), astuple(other), strict=True)))

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step of the target gave, its own included; 1 is what it gives without a draft."""
        return self.tokens / self.steps if self.steps else 0.0


def judge(
    decoder: Decoder, draft: Draft, prompts: Iterable[Sequence[int]], stop: frozenset[int], config: EvaluateConfig
) -> Iterator[Judgement]:
    """Yield each prompt's judgement; where tokens are drawn at a temperature, there is no text to compare with."""
    limit, near = config.max_new_tokens, NEAR[decoder.dtype]
    for number, prompt in enumerate(prompts):
        if config.temperature:
            sampler = Sampler(config.temperature, config.seed + number)
            yield Judgement.of(decoder.speculate(draft, prompt, limit, stop, sampler))
        else:
            own, speculated = decoder.greedy(prompt, limit, stop), decoder.speculate(draft, prompt, limit, stop)
            yield compare(own, speculated, near)


def compare(own: Greedy, speculated: Speculated, near_tie: float = NEAR[torch.float32]) -> Judgement:
    """Compare one prompt's speculated text with the target's own, up to the first difference.

    Best logits that are closer than ``near_tie`` are a near tie.
    """
    pairs = zip(own.tokens, speculated.tokens, strict=False)
    place = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
    if place is None and len(own.tokens) != len(speculated.tokens):
        place = min(len(own.tokens), len(speculated.tokens)) - 1
    near = place is not None and own.margins[place] < near_tie
    return replace(Judgement.of(speculated), near_ties=int(near), differing=int(place is not None and not near))


def prompts_of(cache: Cache, samples: Sequence[int]) -> Iterator[list[int]]:
    """Yield, for each sample, its tokens up to the first supervised one; none for a sample that begins with it."""
    for sample in samples:
        batch = cache.read([sample], columns=(IDS, MASK))
        supervised = np.flatnonzero(batch[MASK][0].numpy())
        prompt = batch[IDS][0][: int(supervised[0])].tolist() if supervised.size else []
        if prompt:
            yield prompt


def evaluate(config: EvaluateConfig) -> Judgement:
    """Decode the prompts with the draft, greedily also without it, and return what came of it.

    ValueError, OSError or ImportError for what a user can get wrong.
    """
    check_settings(config)
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
    total = Judgement()
    with start_progress("evaluate", len(prompts), "prompts") as progress:
        for one in judge(Decoder(model, trained.layers), draft, prompts, _stops(model), config):
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
