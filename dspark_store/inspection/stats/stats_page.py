"""The statistics as one page of HTML: nothing on it comes from elsewhere, and there is no script."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.inspection.stats.figures import Figures, figure_text
from dspark_store.inspection.stats.plots import Axis, Bar, Line, columns, hue, lines, ranges, rows

_TEMPLATE = "stats_page.html"


def render_page(statistics: Mapping[str, JsonValue]) -> str:
    """Return the page of a store's statistics; texts from the store are escaped wherever they stand."""
    environment = Environment(
        loader=PackageLoader("dspark_store.inspection.stats", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    figures = Figures(statistics)
    states = _states(figures)
    return environment.get_template(_TEMPLATE).render(
        s=statistics,
        name=PurePath(str(figures.value("store.path"))).name,
        fig=figures.markup,
        say=figure_text,
        states=[(label, path, hue(place, len(states))) for place, (label, path) in enumerate(states)],
        plots=_plots(figures, states),
    )


def _states(figures: Figures) -> list[tuple[str, str]]:
    """Return (label, path) of every layer, and of the last hidden states where they are no layer's own objects."""
    paths = [f"layers.{place}" for place in figures.places("layers")]
    states = [(f"layer {figures.text(f'{path}.layer_id')}", path) for path in paths]
    if figures.value("last_hidden_states") is not None:
        same = figures.value("last_hidden_states.same_objects_as_layer")
        if same is None or same not in {figures.value(f"{path}.layer_id") for _, path in states}:
            states.append(("last", "last_hidden_states"))
    return states


def _plots(figures: Figures, states: list[tuple[str, str]]) -> dict[str, Markup]:
    plots = {"lengths": _lengths(figures)}
    measured = [(label, path) for label, path in states if figures.value(f"{path}.tokens")]
    if measured:
        plots |= {"norms": _norms(figures, measured), "channels": _channels(figures, measured)}
    near = [place for place in figures.places("neighbours") if figures.value(f"neighbours.{place}.tokens")]
    if near:
        plots["neighbours"] = _neighbours(figures, near)
    if figures.value("vocabulary.all.used"):
        plots["vocabulary"] = _ranks(figures)
    return plots


def _lengths(figures: Figures) -> Markup:
    width = int(figures.number("lengths.histogram.width"))
    bars = []
    for place, start in enumerate(figures.numbers("lengths.histogram.starts")):
        path = f"lengths.histogram.counts.{place}"
        span = f"{start:,.0f}" if width == 1 else f"{start:,.0f} to {start + width - 1:,.0f}"
        bars.append(Bar(path, f"{start:,.0f}", f"{span} tokens: {figures.text(path)} samples"))
    summary = (
        f"Histogram of sample lengths: {figures.text('lengths.samples')} samples, from "
        f"{figures.text('lengths.min')} to {figures.text('lengths.max')} tokens, "
        f"half of them at most {figures.text('lengths.quantiles.p50')}"
    )
    return columns(figures, bars, summary)


def _norms(figures: Figures, states: list[tuple[str, str]]) -> Markup:
    positive = [
        figures.number(f"{path}.norm.{end}") for _, path in states for end in ("min", "quantiles.p1", "quantiles.p50")
    ]
    low = min([value for value in positive if value > 0], default=1.0)
    high = max([low, *(figures.number(f"{path}.norm.max") for _, path in states)])
    said = "; ".join(f"{label}: median {figures.text(f'{path}.norm.quantiles.p50')}" for label, path in states)
    items = [(label, f"{path}.norm") for label, path in states]
    return ranges(figures, items, Axis(low, high, logarithmic=True), f"Token norms by layer. {said}")


def _channels(figures: Figures, states: list[tuple[str, str]]) -> Markup:
    profiles = [(label, f"{path}.channels.rms_by_rank") for label, path in states]
    ranks = figures.numbers(f"{profiles[0][1]}.rank")
    sizes = [value for _, path in profiles for value in figures.numbers(f"{path}.rms") if value > 0] or [1.0]
    said = "; ".join(
        f"{label}: {figures.text(f'{path}.channels.outliers.count')} outlier channels" for label, path in states
    )
    return lines(
        figures,
        [Line(label, f"{path}.rank", f"{path}.rms") for label, path in profiles],
        Axis(1, max(ranks), logarithmic=True),
        Axis(min(sizes), max(sizes), logarithmic=True),
        f"Root mean square of the channels of each layer, the greatest first. {said}",
    )


def _neighbours(figures: Figures, places: list[int]) -> Markup:
    bars = []
    for place in places:
        path = f"neighbours.{place}"
        label = f"{figures.text(f'{path}.lower')} → {figures.text(f'{path}.upper')}"
        mean = figures.text(f"{path}.cosine.mean")
        bars.append(Bar(f"{path}.cosine.mean", label, f"{label}: mean cosine {mean}"))
    axis = Axis(min([0.0, *(figures.number(bar.path) for bar in bars)]), 1.0)
    said = "; ".join(bar.hint for bar in bars)
    return rows(figures, bars, axis, f"Cosine between the states of neighbouring layers. {said}")


def _ranks(figures: Figures) -> Markup:
    kinds = [("all tokens", "vocabulary.all")]
    if figures.value("vocabulary.supervised.used"):
        kinds.append(("supervised", "vocabulary.supervised"))
    greatest = figures.number("vocabulary.all.by_rank.count.0")
    return lines(
        figures,
        [Line(name, f"{path}.by_rank.rank", f"{path}.by_rank.count") for name, path in kinds],
        Axis(1, figures.number("vocabulary.all.used"), logarithmic=True),
        Axis(1, greatest, logarithmic=True),
        f"How often token ids stand in the store, the most frequent first: {figures.text('vocabulary.all.used')} ids, "
        f"from {figures.text('vocabulary.all.by_rank.count.0')} times down",
    )
