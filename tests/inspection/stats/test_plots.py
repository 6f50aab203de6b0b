"""Plots: axes, marks at the places of their values, and nothing from the store that is not escaped."""

import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.inspection.stats.figures import Figures
from dspark_store.inspection.stats.plots import Axis, Bar, Line, columns, hue, lines, ranges, rows

FIGURES = Figures(
    {
        "counts": [0, 5, 10],
        "cosines": [0.5, -0.5],
        "line": {"x": [1, 10, 100], "y": [100.0, 10.0, 1.0]},
        "norm": {"min": 1.0, "max": 100.0, "quantiles": {"p5": 3.0, "p50": 10.0, "p95": 50.0}},
    }
)


def marks(markup, tag):
    """Return the attributes of the marks of a kind that show a figure."""
    root = ET.fromstring(markup)
    return [item.attrib for item in root.iter(tag) if "data-json" in item.attrib]


@given(st.floats(0, 1e6), st.floats(1e-3, 1e6))
def test_ticks_of_a_linear_axis_lie_on_it_and_are_few(low, width):
    ticks = Axis(low, low + width).ticks()
    assert 1 <= len(ticks) <= 7
    assert all(low - width * 1e-6 <= tick <= low + width * (1 + 1e-6) for tick in ticks)


@given(st.floats(1e-6, 1e6), st.floats(1.001, 1e9))
def test_ticks_of_a_logarithmic_axis_lie_on_it_and_are_few(low, ratio):
    ticks = Axis(low, low * ratio, logarithmic=True).ticks()
    assert 1 <= len(ticks) <= 6
    assert all(low * (1 - 1e-6) <= tick <= low * ratio * (1 + 1e-6) for tick in ticks)


def test_an_axis_of_one_value_has_it_in_the_middle():
    assert Axis(3, 3).place(3) == 0.5
    assert Axis(3, 3, logarithmic=True).ticks() == [3]


def test_standing_bars_are_as_high_as_their_counts():
    drawn = columns(FIGURES, [Bar(f"counts.{at}", str(at), "hint") for at in range(3)], "three bars")
    heights = {mark["data-json"]: float(mark["height"]) for mark in marks(drawn, "rect")}
    assert heights == {"counts.0": 0, "counts.1": 100, "counts.2": 200}


def test_lying_bars_begin_at_zero_on_either_side():
    drawn = rows(FIGURES, [Bar(f"cosines.{at}", str(at), "hint") for at in range(2)], Axis(-1, 1), "two bars")
    places = [(float(mark["x"][:-1]), float(mark["width"][:-1])) for mark in marks(drawn, "rect")]
    assert places == [(50, 25), (25, 25)]


def test_a_range_is_drawn_from_its_ends_with_its_median():
    drawn = ranges(FIGURES, [("layer 1", "norm")], Axis(1, 100, logarithmic=True), "one range")
    whole, most = marks(drawn, "line")
    assert (whole["x1"], whole["x2"]) == ("0.000%", "100.000%")
    assert (whole["data-json"], whole["data-to"]) == ("norm.min", "norm.max")
    assert (most["data-json"], most["data-to"]) == ("norm.quantiles.p5", "norm.quantiles.p95")
    (median,) = marks(drawn, "circle")
    assert (median["cx"], median["data-json"]) == ("50.000%", "norm.quantiles.p50")


def test_a_line_goes_through_its_points():
    axis = Axis(1, 100, logarithmic=True)
    (line,) = marks(lines(FIGURES, [Line("all", "line.x", "line.y")], axis, axis, "a line"), "polyline")
    assert line["points"] == "0.000,0.000 50.000,50.000 100.000,100.000"


def test_texts_are_escaped():
    drawn = columns(FIGURES, [Bar("counts.0", "<script>", '"><script>')], '"><script>')
    assert "<script>" not in drawn
    assert re.search(r'aria-label="&#34;&gt;&lt;script&gt;"', drawn)


@pytest.mark.parametrize("count", [1, 2, 40])
def test_hues_go_from_blue_to_red(count):
    assert hue(0, count) == 215
    assert count == 1 or hue(count - 1, count) == 345
