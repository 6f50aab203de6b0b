"""The statistics of a store as one page of HTML with plots, without scripts. Needs matplotlib, the extra ``plot``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from colorsys import hls_to_rgb
from io import StringIO
from pathlib import PurePath
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from dspark_store.inspection.stats.report import figure_text

type Document = Mapping[str, Any]
"""Parsed JSON, as `measure_store` returns it."""
type States = tuple[str, str, Document]
"""Label, colour and figures of a layer, or of the last hidden states."""

_TEMPLATE = "page.html"
_INK = "#010203"  # the colour of text and axes, which becomes the page's own
_INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
_WIDTH, _HEIGHT, _ROW = 4.6, 2.6, 0.32  # inches; a page scales them to its width
_KINDS = ("C0", "C3")
_FIRST_HUE, _LAST_HUE = 215, 345  # blue for the first layer to red for the last
_DECADES = 2.5  # an axis of fewer decades has ticks within each


def render_page(statistics: Document) -> str:
    """Return the page of a store's statistics; texts from the store are escaped wherever they stand."""
    environment = Environment(
        loader=PackageLoader("dspark_store.inspection.stats", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["fig"] = figure_text
    inked = dict.fromkeys(_INKED, _INK)
    on_page = {"axes.facecolor": "none", "savefig.facecolor": "none", "font.size": 11}
    with style.context(["dspark_store.plot", {**inked, **on_page}]):
        states = _states(statistics)
        return environment.get_template(_TEMPLATE).render(
            s=statistics,
            name=PurePath(statistics["store"]["path"]).name,
            states=states,
            colours=[to_hex(colour) for colour in _KINDS],
            plots=_plots(statistics, states),
        )


def _states(statistics: Document) -> list[States]:
    """Return every layer, and the last hidden states where they are no layer's own objects, coloured by depth."""
    found = [(f"layer {layer['layer_id']}", layer) for layer in statistics["layers"]]
    last = statistics["last_hidden_states"]
    if last is not None and last["same_objects_as_layer"] not in {layer["layer_id"] for layer in statistics["layers"]}:
        found.append(("last", last))
    hues = [
        (_FIRST_HUE + (_LAST_HUE - _FIRST_HUE) * place / max(1, len(found) - 1)) / 360 for place in range(len(found))
    ]
    # of a middle lightness, which is seen on a light and on a dark ground
    colours = [to_hex(hls_to_rgb(hue, 0.55, 0.75)) for hue in hues]
    return [(label, colour, figures) for (label, figures), colour in zip(found, colours, strict=True)]


def _plots(statistics: Document, states: Sequence[States]) -> dict[str, Markup]:
    plots = {"lengths": _lengths(statistics["lengths"])}
    measured = [item for item in states if item[2]["tokens"]]
    if measured:
        plots |= {"norms": _norms(measured), "channels": _channels(measured)}
    near = [pair for pair in statistics["neighbours"] if pair["tokens"]]
    if near:
        plots["neighbours"] = _neighbours(near)
    if statistics["vocabulary"]["all"]["used"]:
        plots["vocabulary"] = _vocabulary(statistics["vocabulary"])
    return plots


def _axes(height: float = _HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure((_WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _lengths(lengths: Document) -> Markup:
    figure, axes = _axes()
    histogram = lengths["histogram"]
    axes.bar(histogram["starts"], histogram["counts"], 0.88 * histogram["width"], align="edge")
    axes.grid(visible=False, axis="x")
    axes.locator_params(axis="y", integer=True)
    axes.set(xlabel="tokens per sample", ylabel="samples")
    samples, low, middle, high = (
        figure_text(value)
        for value in (lengths["samples"], lengths["min"], lengths["quantiles"]["p50"], lengths["max"])
    )
    return _svg(
        figure,
        f"Histogram of sample lengths: {samples} samples, from {low} to {high} tokens, half of them at most {middle}",
    )


def _norms(states: Sequence[States]) -> Markup:
    figure, axes = _axes(0.7 + _ROW * len(states))
    norms = [figures["norm"] for _, _, figures in states]
    ends = [value for norm in norms for value in (norm["min"], norm["quantiles"]["p1"], norm["quantiles"]["p50"])]
    least = min([value for value in ends if value > 0], default=1.0)  # a logarithmic axis has no zero
    for row, norm in enumerate(norms):
        p5, p50, p95 = (max(least, norm["quantiles"][name]) for name in ("p5", "p50", "p95"))
        axes.hlines(row, max(least, norm["min"]), max(least, norm["max"]), color="C0", linewidth=1.2)
        axes.hlines(row, p5, p95, color="C0", linewidth=7, alpha=0.45)
        axes.plot(p50, row, "o", color="C0")
    _label_rows(axes, [label for label, _, _ in states])
    _logarithmic(axes, "x")
    axes.set_xlabel("norm")
    medians = [f"{label}: median {figure_text(figures['norm']['quantiles']['p50'])}" for label, _, figures in states]
    return _svg(figure, f"Token norms by layer. {'; '.join(medians)}")


def _channels(states: Sequence[States]) -> Markup:
    figure, axes = _axes()
    for _, colour, figures in states:
        profile = figures["channels"]["rms_by_rank"]
        # nothing is left to draw of a channel that is always zero
        drawn = [(rank, rms) for rank, rms in zip(profile["rank"], profile["rms"], strict=True) if rms > 0]
        axes.plot([rank for rank, _ in drawn], [rms for _, rms in drawn], color=colour, marker=_marker(drawn))
    for axis in ("x", "y"):
        _logarithmic(axes, axis)
    axes.set(xlabel="rank of the channel", ylabel="root mean square")
    outliers = [f"{label}: {figures['channels']['outliers']['count']} outlier channels" for label, _, figures in states]
    return _svg(figure, f"Root mean square of the channels of each layer, the greatest first. {'; '.join(outliers)}")


def _neighbours(pairs: Sequence[Document]) -> Markup:
    figure, axes = _axes(0.7 + _ROW * len(pairs))
    labels = [f"{pair['lower']} → {pair['upper']}" for pair in pairs]
    means = [pair["cosine"]["mean"] for pair in pairs]
    axes.barh(range(len(pairs)), means, 0.65)
    _label_rows(axes, labels)
    axes.set_xlim(min(0.0, *means), 1.0)
    axes.set_xlabel("mean cosine")
    said = [f"{label}: mean cosine {figure_text(mean)}" for label, mean in zip(labels, means, strict=True)]
    return _svg(figure, f"Cosine between the states of neighbouring layers. {'; '.join(said)}")


def _vocabulary(vocabulary: Document) -> Markup:
    figure, axes = _axes()
    for kind, colour in zip(("all", "supervised"), _KINDS, strict=True):
        ranks = vocabulary[kind]["by_rank"]
        axes.plot(ranks["rank"], ranks["count"], color=colour, marker=_marker(ranks["rank"]))
    for axis in ("x", "y"):
        _logarithmic(axes, axis)
    axes.set(xlabel="rank of the id", ylabel="occurrences")
    used, most = figure_text(vocabulary["all"]["used"]), figure_text(vocabulary["all"]["by_rank"]["count"][0])
    return _svg(
        figure,
        f"How often token ids stand in the store, the most frequent first: {used} ids, from {most} times down",
    )


def _marker(points: Sequence[object]) -> str:
    return "" if len(points) > 1 else "o"  # a line of one point is not seen


def _label_rows(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def _logarithmic(axes: Axes, name: str) -> None:
    """Make an axis logarithmic, with a few plain numbers on it however short it is."""
    axes.set(**{f"{name}scale": "log"})
    axis = axes.xaxis if name == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < low * 10**_DECADES else (1,), numticks=6))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_locator(NullLocator())


def _svg(figure: Figure, summary: str) -> Markup:
    """Return a plot as an element of a page, which draws it in its own colour of text and at its own width."""
    text = StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    drawn = text.getvalue()
    drawn = drawn[drawn.index("<svg") :].replace(_INK, "currentColor")
    # comments and metadata name matplotlib and its site; ids that are not referred to would occur in every plot
    drawn = re.sub(
        r'<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->| id="[\w.]+_\d+"', "", drawn, flags=re.DOTALL
    )
    box = re.search(r'viewBox="[\d. ]+"', drawn)
    opening = Markup('<svg class="plot" role="img" aria-label="{}" {}>').format(
        summary, Markup(box.group() if box else "")
    )
    return opening + Markup(drawn[drawn.index(">") + 1 :])  # matplotlib escapes what it writes
