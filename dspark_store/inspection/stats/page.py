"""The statistics of a store as one page of HTML with plots, without scripts. Needs matplotlib, the extra ``plot``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from colorsys import hls_to_rgb
from io import StringIO
from pathlib import PurePath
from typing import Any, cast

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from dspark_store.inspection.stats.figures import figure_text

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
    # of a middle lightness, which is seen on a light and on a dark ground
    hues = np.linspace(_FIRST_HUE, _LAST_HUE, len(found)) / 360
    colours = [to_hex(hls_to_rgb(hue, 0.55, 0.75)) for hue in hues.tolist()]
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


def _axes(xlabel: str, ylabel: str = "", *, rows: Sequence[str] = ()) -> Axes:
    """Return the axes of a new plot; with ``rows`` it has one for each of these labels, from the top down."""
    figure = Figure((_WIDTH, 0.7 + _ROW * len(rows) if rows else _HEIGHT), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    if rows:
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
    return axes


def _lengths(lengths: Document) -> Markup:
    axes, histogram = _axes("tokens per sample", "samples"), lengths["histogram"]
    axes.bar(histogram["starts"], histogram["counts"], 0.88 * histogram["width"], align="edge")
    axes.grid(visible=False, axis="x")
    axes.locator_params(axis="y", integer=True)
    found = (lengths["samples"], lengths["min"], lengths["max"], lengths["quantiles"]["p50"])
    samples, low, high, middle = map(figure_text, found)
    summary = (
        f"Histogram of sample lengths: {samples} samples, from {low} to {high} tokens, half of them at most {middle}"
    )
    return _svg(axes, summary)


def _norms(states: Sequence[States]) -> Markup:
    axes = _axes("norm", rows=[label for label, _, _ in states])
    norms = [figures["norm"] for _, _, figures in states]
    ends = [value for norm in norms for value in (norm["min"], norm["quantiles"]["p1"], norm["quantiles"]["p50"])]
    least = min([value for value in ends if value > 0], default=1.0)  # a logarithmic axis has no zero
    for row, norm in enumerate(norms):
        p5, p50, p95 = (max(least, norm["quantiles"][name]) for name in ("p5", "p50", "p95"))
        axes.hlines(row, max(least, norm["min"]), max(least, norm["max"]), color="C0", linewidth=1.2)
        axes.hlines(row, p5, p95, color="C0", linewidth=7, alpha=0.45)
        axes.plot(p50, row, "o", color="C0")
    _logarithmic(axes, "x")
    medians = [f"{label}: median {figure_text(figures['norm']['quantiles']['p50'])}" for label, _, figures in states]
    return _svg(axes, f"Token norms by layer. {'; '.join(medians)}")


def _channels(states: Sequence[States]) -> Markup:
    axes = _axes("rank of the channel", "root mean square")
    for _, colour, figures in states:
        profile = figures["channels"]["rms_by_rank"]
        # nothing is left to draw of a channel that is always zero
        _curve(axes, [pair for pair in zip(profile["rank"], profile["rms"], strict=True) if pair[1] > 0], colour)
    _logarithmic(axes, "xy")
    outliers = [f"{label}: {figures['channels']['outliers']['count']} outlier channels" for label, _, figures in states]
    return _svg(axes, f"Root mean square of the channels of each layer, the greatest first. {'; '.join(outliers)}")


def _neighbours(pairs: Sequence[Document]) -> Markup:
    means = {f"{pair['lower']} → {pair['upper']}": pair["cosine"]["mean"] for pair in pairs}
    axes = _axes("mean cosine", rows=list(means))
    axes.barh(range(len(means)), list(means.values()), 0.65)
    axes.set_xlim(min(0.0, *means.values()), 1.0)
    said = [f"{label}: mean cosine {figure_text(mean)}" for label, mean in means.items()]
    return _svg(axes, f"Cosine between the states of neighbouring layers. {'; '.join(said)}")


def _vocabulary(vocabulary: Document) -> Markup:
    axes = _axes("rank of the id", "occurrences")
    for kind, colour in zip(("all", "supervised"), _KINDS, strict=True):
        ranks = vocabulary[kind]["by_rank"]
        _curve(axes, list(zip(ranks["rank"], ranks["count"], strict=True)), colour)
    _logarithmic(axes, "xy")
    used, most = figure_text(vocabulary["all"]["used"]), figure_text(vocabulary["all"]["by_rank"]["count"][0])
    summary = f"How often token ids stand in the store, the most frequent first: {used} ids, from {most} times down"
    return _svg(axes, summary)


def _curve(axes: Axes, points: Sequence[tuple[float, float]], colour: str) -> None:
    marker = "" if len(points) > 1 else "o"  # a line of one point is not seen
    axes.plot([x for x, _ in points], [y for _, y in points], color=colour, marker=marker)


def _logarithmic(axes: Axes, names: str) -> None:
    """Make axes logarithmic, with a few plain numbers on them however short they are."""
    for name in names:
        label = getattr(axes, f"get_{name}label")()
        axes.set(**{f"{name}scale": "log", f"{name}label": f"{label}, logarithmic" if label else "logarithmic"})
    for axis in (getattr(axes, f"{name}axis") for name in names):
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < low * 10**_DECADES else (1,), numticks=6))
        axis.set_major_formatter("{x:,g}")
        axis.set_minor_locator(NullLocator())


def _svg(axes: Axes, summary: str) -> Markup:
    """Return a plot as an element of a page, which draws it in its own colour of text and at its own width."""
    text = StringIO()
    cast(Figure, axes.figure).savefig(text, format="svg", metadata={"Date": None})
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
