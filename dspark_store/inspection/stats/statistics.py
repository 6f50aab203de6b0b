"""The statistics of a store as JSON: what ``stats.json`` holds and its page shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.schema import LAST, LAYERS
from dspark_store.inspection.stats.layer_summary import Summary, spread, summarise_layer
from dspark_store.inspection.stats.lengths import summarise_lengths, summarise_sources, summarise_supervision
from dspark_store.inspection.stats.shard_survey import StatesTally
from dspark_store.inspection.stats.survey import Selection, Survey, survey_store, vocabulary_size
from dspark_store.inspection.stats.token_tally import empty_tokens
from dspark_store.inspection.stats.vocabulary import Decode, summarise_vocabulary
from dspark_store.readers.cache import Cache

STATISTICS_VERSION = 1
DEFAULT_OUTLIER_FACTOR = 10.0


@dataclass(frozen=True, slots=True)
class Rules:
    """What is read, and by which measure: see `Selection` and `summarise_layer`."""

    selection: Selection = field(default_factory=Selection)
    outlier_factor: float = DEFAULT_OUTLIER_FACTOR

    def __post_init__(self) -> None:
        if not self.outlier_factor >= 1:
            raise ValueError(f"--outlier-factor must be >= 1, got {self.outlier_factor}")


def measure_store(
    cache: Cache,
    rules: Rules,
    *,
    threads: int | None = None,
    scheduler: str | None = None,
    progress: Callable[[int], None] | None = None,
    decode: Decode | None = None,
) -> dict[str, JsonValue]:
    """Return the statistics of a store as JSON, in one pass; see `survey_store` for what it takes and raises.

    They are the same, bit by bit, however many threads or workers there are. ``decode`` turns ids into their texts.
    """
    survey = survey_store(cache, rules.selection, threads=threads, scheduler=scheduler, progress=progress)
    states = survey.tally.states if survey.tally is not None else None
    tokens = survey.tally.tokens if survey.tally is not None else empty_tokens(None)
    return {
        "version": STATISTICS_VERSION,
        "store": _identity(cache, survey),
        "read": _extent(survey, rules.selection),
        "lengths": summarise_lengths(cache),
        "supervision": summarise_supervision(cache),
        "sources": summarise_sources(cache),
        "vocabulary": summarise_vocabulary(tokens, vocabulary_size(cache), decode),
        **_states(cache, survey, states, rules.outlier_factor),
    }


def _identity(cache: Cache, survey: Survey) -> Summary:
    schema = cache.schema
    return {
        "path": str(cache.storage),
        "store_id": cache.record.store_id,
        "phase": cache.record.phase,
        "target_model": cache.manifest.get("target_model"),
        "dtype": schema.dtype.logical,
        "codec": schema.codec,
        "samples": schema.num_samples,
        "seq_length": schema.seq_length,
        "hidden_size": schema.hidden_size,
        "layer_ids": list(schema.layer_ids),
        "shards": schema.tokens.num_shards,
        "captured_shards": survey.captured,
        "nonfinite_samples": int((cache.status == 1).sum()) if cache.record.complete else None,
    }


def _extent(survey: Survey, selection: Selection) -> Summary:
    states = survey.tally.states if survey.tally is not None else None
    return {
        "samples": survey.tally.samples if survey.tally is not None else 0,
        "samples_with_states": states.samples if states is not None else 0,
        "drawn": selection.samples is not None,
        "seed": selection.seed if selection.samples is not None else None,
        "layers": list(survey.layers),
        "last_hidden_states": selection.last,
    }


def _states(cache: Cache, survey: Survey, states: StatesTally | None, factor: float) -> dict[str, JsonValue]:
    """Return the figures of the layers, of the last hidden states and of neighbours; empty before any is captured."""
    if states is None:
        return {"layers": [], "last_hidden_states": None, "neighbours": []}
    ids = survey.layers
    layers: list[JsonValue] = [
        {"layer_id": layer, "column": LAYERS, **summarise_layer(tally, factor)}
        for layer, tally in zip(ids, states.layers, strict=True)
    ]
    neighbours: list[JsonValue] = [
        {"lower": lower, "upper": upper, "tokens": cosines.count, "cosine": spread(cosines)}
        for lower, upper, cosines in zip(ids[:-1], ids[1:], states.neighbours, strict=True)
    ]
    last: JsonValue = None
    if states.last is not None:
        same = cache.schema.layer_id(states.shared) if states.shared >= 0 else None
        last = {"column": LAST, "same_objects_as_layer": same, **summarise_layer(states.last, factor)}
    return {"layers": layers, "last_hidden_states": last, "neighbours": neighbours}
