"""What a training is given: a store that suits it, loaders of its samples, and the target's side of the draft."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor

from dspark_store.draft.model import Draft
from dspark_store.draft.settings import DraftSettings, MarkovKind
from dspark_store.format.dtypes import CACHE_DTYPES
from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.manifest import Manifest
from dspark_store.readers.cache import Cache, open_cache
from dspark_store.readers.epoch import Side
from dspark_store.readers.loader import CacheLoader
from dspark_store.target.source import TargetSource
from dspark_store.training.ranks import Ranks
from dspark_store.training.settings import TrainConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExpectedStore:
    """What a run expects of a store; None where it does not say. ``target_model`` is a name, which only warns.

    ``num_hidden_layers`` counts the layers of the whole target.
    """

    target_model: str | None = None
    target_model_type: str | None = None
    target_vocab_size: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    seq_length: int | None = None
    layers: Sequence[int] | None = None

    @classmethod
    def of_target(
        cls, target: TargetSource, *, seq_length: int | None = None, layers: Sequence[int] | None = None
    ) -> ExpectedStore:
        """Read what a target's text configuration says, as a precompute writes it down. ValueError when it has none."""
        from dspark_store.target.load import load_target_config, text_config

        text = text_config(load_target_config(target))
        return cls(
            target_model=target.model,
            target_model_type=str(text.model_type),
            target_vocab_size=int(text.vocab_size),
            hidden_size=int(text.hidden_size),
            num_hidden_layers=int(text.num_hidden_layers),
            seq_length=seq_length,
            layers=layers,
        )


_COMPARED = ("target_model_type", "target_vocab_size", "hidden_size", "num_hidden_layers", "seq_length")
_NEEDED = (*_COMPARED, "dtype", "target_hidden_dim", "target_last_hidden_dim", "target_layer_ids")


def check_manifest(manifest: Manifest, expected: ExpectedStore) -> None:
    """Raise ValueError naming the first field in which a store is not what the run expects, or that it lacks.

    NeMo Automodel's checks, in its order, but for three: states of any dtype train on any device, since they are cast
    anyway; the run's layers may be a subset of the captured ones; and of a target that was cut to its first layers the
    whole depth is compared. Another name of the target is but a warning: paths differ between machines.
    """
    missing = [name for name in _NEEDED if manifest.get(name) is None]
    if missing:
        raise ValueError(
            f"the store's manifest has no {missing[0]}: it was written without one, and cannot be trained from"
        )
    if expected.target_model not in (None, manifest.get("target_model")):
        _log.warning(
            "the store was made from the target %r, this run names %r",
            manifest.get("target_model"),
            expected.target_model,
        )
    if manifest.get("mantissa_bits") is not None:
        _log.warning("the store is lossy: its states were rounded to %s of 7 mantissa bits", manifest["mantissa_bits"])
    if manifest.get("state_dtype") is not None:
        _log.warning("the store is lossy: its states are %s codes, not the target's own", manifest["state_dtype"])
    whole = manifest.get("target_num_hidden_layers_full")
    stored = manifest if whole is None else {**manifest, "num_hidden_layers": whole}
    for name in _COMPARED:
        _compare(name, stored[name], getattr(expected, name))
    if manifest["dtype"] not in CACHE_DTYPES:
        raise ValueError(f"dtype {manifest['dtype']!r} of the store is unknown; expected {', '.join(CACHE_DTYPES)}")
    captured, width = manifest["target_layer_ids"], manifest["hidden_size"]
    if not isinstance(captured, list) or not isinstance(width, int):
        raise ValueError(f"target_layer_ids of the store is {captured!r}: expected a list of whole numbers")
    _compare("target_hidden_dim", manifest["target_hidden_dim"], width * len(captured))
    _compare("target_last_hidden_dim", manifest["target_last_hidden_dim"], width)
    absent = [layer for layer in expected.layers or () if layer not in captured]
    if absent:
        raise ValueError(f"target_layer_ids of the store are {captured}: layer {absent[0]} was not captured")


def _compare(name: str, stored: object, wanted: object) -> None:
    if wanted is not None and stored != wanted:
        raise ValueError(f"{name} of the store is {stored!r}, this run expects {wanted!r}: use another store")


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
    tied = cache.head.get("tied") is True
    head = embed if tied else tables.head.to(device, dtype)
    return embed, head, None if tables.bias is None else tables.bias.to(device, dtype)


def draft_settings(config: TrainConfig, cache: Cache, captured_layers: int) -> DraftSettings:
    """Return the shape of the draft for a store's target. ValueError when the store does not describe its target."""
    if cache.target_config is None:
        raise ValueError(f"{cache.storage} does not hold its target's configuration, from which a draft's sizes follow")
    sizes = DraftSettings.of_target(cache.target_config, captured_layers, config.mask_token_id)
    return replace(
        sizes,
        intermediate_size=sizes.intermediate_size if config.intermediate_size is None else config.intermediate_size,
        num_layers=config.draft_layers,
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


def _expected(config: TrainConfig) -> ExpectedStore:
    if config.target_model is None:
        return ExpectedStore(seq_length=config.seq_length, layers=config.layers)
    source = TargetSource(config.target_model)
    return ExpectedStore.of_target(source, seq_length=config.seq_length, layers=config.layers)


def _number(fields: Mapping[str, JsonValue], name: str) -> float | None:
    value = fields.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
