"""What a training is given: loaders of samples with their states, and the target's side of the draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from dspark_store.draft.model import Draft
from dspark_store.draft.settings import DraftSettings, MarkovKind, TargetSizes
from dspark_store.format.jsonvalue import JsonValue
from dspark_store.readers.cache import Cache, open_cache
from dspark_store.readers.choice import Side
from dspark_store.readers.loader import CacheLoader
from dspark_store.target.source import TargetSource
from dspark_store.training.manifest import Expected, check_manifest
from dspark_store.training.ranks import Ranks
from dspark_store.training.settings import TrainConfig


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Samples to train on and to validate with, from one store or live target; ``layers`` are those of a batch."""

    cache: Cache
    layers: tuple[int, ...]
    train: CacheLoader
    validation: CacheLoader | None


def open_data(config: TrainConfig, ranks: Ranks, check: Callable[[], None] = lambda: None) -> TrainingData:
    """Open the store, or load the target that takes its place; all ranks call it together.

    ``check`` is called between writes of a live target's tokens, and may raise to stop. ValueError, OSError or
    ImportError for what a user can get wrong.
    """
    if config.store is not None:
        cache = open_cache(config.store, allow_reduced_depth=config.allow_reduced_depth, threads=config.threads)
    else:
        from dspark_store.training.online import open_live  # what runs a target is for those who run one

        if config.live is None:
            raise ValueError("online training needs the settings of a precompute: give them as TrainConfig.live")
        cache = open_live(config.live, ranks, check, allow_reduced_depth=config.allow_reduced_depth)
    check_manifest(cache.manifest, _expected(config))
    layers = config.layers or cache.layer_ids
    train = _loader(config, cache, layers, ranks, "train")
    validation = _loader(config, cache, layers, ranks, "validation") if config.validation_fraction else None
    return TrainingData(cache, layers, train, validation)


def build_draft(config: TrainConfig, data: TrainingData) -> Draft:
    """Build the draft with fresh weights, from torch's global generator, between the target's own tables."""
    embed, head, bias = target_tables(data.cache, torch.device("cpu"), config.compute_dtype)
    return Draft(draft_settings(config, data.cache, len(data.layers)), embed, head, bias)


def target_tables(cache: Cache, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the target's embedding and head, one tensor where they are tied, and the head's bias, for a draft."""
    tables = cache.weights()
    embed = tables.embed.to(device, dtype)
    tied = tables.head is tables.embed or cache.head.get("tied") is True
    head = embed if tied else tables.head.to(device, dtype)
    return embed, head, None if tables.bias is None else tables.bias.to(device, dtype)


def draft_settings(config: TrainConfig, cache: Cache, captured_layers: int) -> DraftSettings:
    """Return the shape of the draft for a store's target. ValueError when the store does not describe its target."""
    if cache.target_config is None:
        raise ValueError(f"{cache.storage} does not hold its target's configuration, from which a draft's sizes follow")
    shape = TargetSizes.of(cache.target_config)
    return DraftSettings(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        captured_layers=captured_layers,
        mask_token_id=config.mask_token_id,
        num_layers=config.draft_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=config.intermediate_size or shape.intermediate_size,
        rms_norm_eps=shape.rms_norm_eps,
        rope_theta=shape.rope_theta,
        block_size=config.block_size,
        markov=cast(MarkovKind, config.markov),
        markov_rank=config.markov_rank,
        confidence=not config.no_confidence,
        logit_scale=_number(cache.head, "logit_scale"),
        final_logit_softcapping=_number(cache.head, "final_logit_softcapping"),
        embedding_scale=_number(cache.head, "embedding_scale"),
        head_bias=cache.head.get("head_bias") is True,
    )


def _loader(config: TrainConfig, cache: Cache, layers: tuple[int, ...], ranks: Ranks, side: Side) -> CacheLoader:
    trains = side == "train"
    return CacheLoader(
        cache,
        config.batch_size,
        shuffle=trains,
        seed=config.seed,
        window_shards=config.window_shards if trains else None,
        last="repeat" if trains else "short",  # the same samples of an epoch on any number of ranks
        shape=cast("Literal['longest', 'full']", config.shape),
        layers=layers,
        min_supervised=config.min_supervised,
        split=side if config.validation_fraction else None,
        validation_fraction=config.validation_fraction,
        dp_rank=ranks.rank,
        dp_size=ranks.size,
        prefetch_bytes=config.prefetch_bytes,
        device=ranks.device if ranks.device.type == "cuda" else None,
    )


def _expected(config: TrainConfig) -> Expected:
    if config.target_model is None:
        return Expected(seq_length=config.seq_length, layers=config.layers)
    source = TargetSource(config.target_model)
    return Expected.of_target(source, seq_length=config.seq_length, layers=config.layers)


def _number(fields: Mapping[str, JsonValue], name: str) -> float | None:
    value = fields.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
