"""Plots as inline SVG: no library, no script, colours from the page's style.

Places along a plot's width are percentages and those along its height pixels, so that text keeps its size on a phone.
Every mark names the figure that it shows by its path in the JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from dspark_store.inspection.stats.figures import Figures, figure_text

_HEIGHT = 200
_ROW = 28
_MOST_TICKS = 5
_FIRST_HUE, _LAST_HUE = 215, 345


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear or logarithmic axis from ``low`` to ``high``; `place` gives 0 to 1."""

    low: float
    high: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Return where a value stands between the ends."""
        low, high, value = (math.log10(end) if self.logarithmic else end for end in (self.low, self.high, value))
        return (value - low) / (high - low) if high > low else 0.5

    def ticks(self) -> list[float]:
        """Return a few round values between the ends, ascending."""
        if self.logarithmic:
            return self._powers()
        step = _round_step((self.high - self.low) / _MOST_TICKS)
        first, last = math.ceil(self.low / step - 1e-6), math.floor(self.high / step + 1e-6)
        return [step * number for number in range(first, last + 1)]

    def _powers(self) -> list[float]:
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        if last - first < 1:
            return [self.low, self.high] if self.high > self.low else [self.low]
        step = math.ceil((last - first + 1) / _MOST_TICKS)
        return [10.0**power for power in range(first, last + 1, step)]


def _round_step(least: float) -> float:
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar: the path of its value, the label below or beside it, and what it says when it is pointed at."""

    path: str
    label: str
    hint: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line: its name and the paths of two lists of numbers of one length."""

    name: str
    across: str
    up: str


def hue(place: int, count: int) -> int:
    """Return the hue of the thing number ``place`` of ``count``, blue for the first to red for the last."""
    return _FIRST_HUE + (_LAST_HUE - _FIRST_HUE) * place // max(1, count - 1)


def columns(figures: Figures, bars: Sequence[Bar], summary: str) -> Markup:
    """Return standing bars, as of a histogram. The labels of some are shown."""
    axis = Axis(0, max([1.0, *(figures.number(bar.path) for bar in bars)]))
    marks = [_level(axis, value) for value in axis.ticks()]
    width = 100 / max(1, len(bars))
    every = math.ceil(len(bars) / _MOST_TICKS)
    for place, bar in enumerate(bars):
        height = _HEIGHT * axis.place(figures.number(bar.path))
        marks.append(
            _mark(
                Markup('<rect class="bar" x="{:.3f}%" y="{:.2f}" width="{:.3f}%" height="{:.2f}"').format(
                    place * width + width * 0.06, _HEIGHT - height, width * 0.88, height
                ),
                bar.path,
                bar.hint,
            )
        )
        if place % every == 0:
            marks.append(_text(f"{place * width + width / 2:.3f}%", _HEIGHT + 18, "middle", bar.label))
    return _plot(marks, _HEIGHT, summary, "columns")


def rows(figures: Figures, bars: Sequence[Bar], axis: Axis, summary: str) -> Markup:
    """Return lying bars, each from the axis's zero or its end that is nearer to it."""
    height = _ROW * len(bars)
    zero = axis.place(min(max(0.0, axis.low), axis.high))
    marks = [_upright(axis, value, height) for value in axis.ticks()]
    for place, bar in enumerate(bars):
        end = axis.place(figures.number(bar.path))
        shape = Markup('<rect class="bar" x="{:.3f}%" y="{}" width="{:.3f}%" height="{}"').format(
            100 * min(zero, end), place * _ROW + 5, 100 * abs(end - zero), _ROW - 10
        )
        marks += [_mark(shape, bar.path, bar.hint), _text("-8", place * _ROW + _ROW / 2 + 4, "end", bar.label)]
    return _plot(marks, height, summary, "rows")


def ranges(figures: Figures, items: Sequence[tuple[str, str]], axis: Axis, summary: str) -> Markup:
    """Return a row an item, (label, path): from min to max, from the 5th to the 95th percentile, and the median."""
    height = _ROW * len(items)
    marks = [_upright(axis, value, height) for value in axis.ticks()]
    for place, (label, path) in enumerate(items):
        middle = place * _ROW + _ROW / 2
        marks.append(_text("-8", middle + 4, "end", label))
        for kind, ends in (("whole", ("min", "max")), ("most", ("quantiles.p5", "quantiles.p95"))):
            low, high = (f"{path}.{end}" for end in ends)
            places = (100 * axis.place(max(axis.low, figures.number(end))) for end in (low, high))
            marks.append(
                Markup(
                    '<line class="{}" x1="{:.3f}%" x2="{:.3f}%" y1="{}" y2="{}" data-json="{}" data-to="{}"></line>'
                ).format(kind, *places, middle, middle, low, high)
            )
        median = f"{path}.quantiles.p50"
        shape = Markup('<circle class="median" cx="{:.3f}%" cy="{}" r="5"').format(
            100 * axis.place(max(axis.low, figures.number(median))), middle
        )
        marks.append(_mark(shape, median, f"{label}: median {figures.text(median)}"))
    return _plot(marks, height, summary, "ranges")


def lines(figures: Figures, items: Sequence[Line], across: Axis, up: Axis, summary: str) -> Markup:
    """Return lines over two axes."""
    marks = [_level(up, value) for value in up.ticks()]
    marks += [_upright(across, value, _HEIGHT) for value in across.ticks()]
    drawn = Markup("").join(_line(figures, item, hue(at, len(items)), across, up) for at, item in enumerate(items))
    marks.append(
        Markup('<svg width="100%" height="{}" viewBox="0 0 100 100" preserveAspectRatio="none">{}</svg>').format(
            _HEIGHT, drawn
        )
    )
    return _plot(marks, _HEIGHT, summary, "lines")


def _line(figures: Figures, item: Line, hue: int, across: Axis, up: Axis) -> Markup:
    places = zip(figures.numbers(item.across), figures.numbers(item.up), strict=True)
    points = " ".join(
        f"{100 * across.place(x):.3f},{100 - 100 * up.place(y):.3f}"
        for x, y in places
        if y > 0 or not up.logarithmic  # nothing is left to draw of a channel that is always zero
    )
    return Markup(
        '<polyline class="line" style="--hue:{}" points="{}" data-json="{}" data-to="{}"><title>{}</title></polyline>'
    ).format(hue, points, item.across, item.up, item.name)


def _plot(marks: Iterable[Markup], height: float, summary: str, kind: str) -> Markup:
    return Markup('<svg class="plot {}" role="img" aria-label="{}" height="{}">{}</svg>').format(
        kind, summary, height, Markup("").join(marks)
    )


def _mark(opening: Markup, path: str, hint: str) -> Markup:
    return opening + Markup(' data-json="{}"><title>{}</title></{}>').format(path, hint, opening[1:].split()[0])


def _level(axis: Axis, value: float) -> Markup:
    at = _HEIGHT * (1 - axis.place(value))
    return Markup('<line class="grid" x1="0" x2="100%" y1="{:.2f}" y2="{:.2f}"></line>').format(at, at) + _text(
        "-8", at + 4, "end", _tick(value)
    )


def _upright(axis: Axis, value: float, height: float) -> Markup:
    at = f"{100 * axis.place(value):.3f}%"
    return Markup('<line class="grid" x1="{}" x2="{}" y1="0" y2="{}"></line>').format(at, at, height) + _text(
        at, height + 18, "middle", _tick(value)
    )


def _text(x: str, y: float, anchor: str, text: str) -> Markup:
    return Markup('<text x="{}" y="{:.2f}" text-anchor="{}">{}</text>').format(x, y, anchor, text)


def _tick(value: float) -> str:
    """Return a round value of an axis: it is no figure of the store, so it may be short."""
    if value >= 1e6 or 0 < value < 1e-3:
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-")
    return figure_text(int(value)) if value == int(value) else f"{value:.3g}"
