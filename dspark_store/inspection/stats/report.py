"""The statistics of a store as JSON: what ``stats.json`` holds, and how its figures are written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.schema import LAST, LAYERS
from dspark_store.inspection.shardwise import Workers
from dspark_store.inspection.stats.figures import (
    Decode,
    Summary,
    spread,
    summarise_layer,
    summarise_lengths,
    summarise_sources,
    summarise_supervision,
    summarise_vocabulary,
)
from dspark_store.inspection.stats.survey import Rules, StatsSurvey, tally_store, vocabulary_size
from dspark_store.readers.cache import Cache

STATISTICS_VERSION = 1
type Form = Literal["number", "percent", "power", "id", "token"]
_VISIBLE = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}


def measure_store(
    cache: Cache, rules: Rules, *, workers: Workers | None = None, decode: Decode | None = None
) -> dict[str, JsonValue]:
    """Return the statistics of a store as JSON, in one pass; see `tally_store` for what it takes and raises.

    They are the same, bit by bit, however many threads or workers there are. ``decode`` turns ids into their texts.
    """
    survey = tally_store(cache, rules, workers)
    return {
        "version": STATISTICS_VERSION,
        "store": _identity(cache, survey),
        "read": _extent(survey, rules),
        "lengths": summarise_lengths(cache),
        "supervision": summarise_supervision(cache),
        "sources": summarise_sources(cache),
        "vocabulary": summarise_vocabulary(survey.tally.tokens, vocabulary_size(cache), decode),
        **_states(cache, survey, rules.outlier_factor),
    }


def _identity(cache: Cache, survey: StatsSurvey) -> Summary:
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


def _extent(survey: StatsSurvey, rules: Rules) -> Summary:
    states = survey.tally.states
    return {
        "samples": survey.tally.samples,
        "samples_with_states": states.samples if states is not None else 0,
        "drawn": rules.samples is not None,
        "seed": rules.seed if rules.samples is not None else None,
        "layers": list(survey.layers),
        "last_hidden_states": rules.last,
    }


def _states(cache: Cache, survey: StatsSurvey, factor: float) -> dict[str, JsonValue]:
    """Return the figures of the layers, of the last hidden states and of neighbours; empty before any is captured."""
    states = survey.tally.states
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
        same = cache.schema.layer_id(states.shared) if states.shared is not None else None
        last = {"column": LAST, "same_objects_as_layer": same, **summarise_layer(states.last, factor)}
    return {"layers": layers, "last_hidden_states": last, "neighbours": neighbours}


def summary_lines(statistics: Mapping[str, Any]) -> list[str]:
    """Return a few lines with the most important figures of what `measure_store` returned."""
    store, lengths, vocabulary = statistics["store"], statistics["lengths"], statistics["vocabulary"]
    share = figure_text(statistics["supervision"]["share"], "percent")
    counts = f"{figure_text(lengths['samples'])} samples, {figure_text(lengths['tokens'])} tokens, {share} supervised"
    lines = [f"{counts}, {figure_text(vocabulary['all']['used'])} token ids used"]
    if store["phase"] != "complete":
        captured, shards = figure_text(store["captured_shards"]), figure_text(store["shards"])
        lines.append(f"growing: the states of {captured} of {shards} shards are captured")
    states = [(f"layer {layer['layer_id']}", layer) for layer in statistics["layers"]]
    last = statistics["last_hidden_states"]
    if last is not None and last["same_objects_as_layer"] is None:
        states.append(("last hidden states", last))
    return lines + [
        f"{label}: norm {figure_text(figures['norm']['mean'])} "
        f"(median {figure_text(figures['norm']['quantiles']['p50'])}), "
        f"{figure_text(figures['channels']['outliers']['count'])} outlier channels, "
        f"{figure_text(figures['nonfinite']['values'])} values not finite"
        for label, figures in states
    ]


def figure_text(value: JsonValue, form: Form = "number") -> str:
    """Return how a value is written: whole numbers in full, others with four significant digits, null as a dash.

    "percent" is for shares, "power" for exponents of two, "id" for whole numbers that count nothing, "token" for a
    token's text, whose white space is shown.
    """
    if value is None:
        return "–"  # noqa: RUF001 - a dash, no minus
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return _token_text(value) if form == "token" else value
    if not isinstance(value, int | float):
        raise ValueError(f"a figure is a number, a text or null, got {type(value).__name__}")
    if form == "percent":
        return "< 0.01 %" if 0 < value < 0.00005 else f"{100 * value:.2f} %"
    if form == "power":
        return f"2^{value}"
    if form == "id":
        return str(value)
    return f"{value:,}" if isinstance(value, int) else _decimal(value)


def _decimal(value: float) -> str:
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3e}"
    return f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"


def _token_text(text: str) -> str:
    shown = (_VISIBLE.get(letter, letter) for letter in text)
    return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in shown)
