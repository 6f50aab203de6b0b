"""The page without a browser: figures are the JSON's, everything is escaped, nothing comes from elsewhere."""

import re
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from dspark_store.inspection.stats.figures import figure_text
from dspark_store.inspection.stats.page import render_page
from dspark_store.inspection.stats.survey import Rules, measure_store
from dspark_store.readers.cache import open_cache
from tests.stores import Shape, build_store

INJECTED = "</title><script>alert('x')</script><img src=x onerror=alert(1)>"


class Elements(HTMLParser):
    """The elements of a page, (name, attributes), and the texts of the cells of its tables."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, Any]]] = []
        self.cells: list[str] = []
        self._in_cell = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._in_cell = tag == "td"

    def handle_data(self, data):
        if self._in_cell:
            self.cells.append(data)
            self._in_cell = False

    def names(self):
        return {name for name, _ in self.found}


def plots_of(page):
    """Return the drawings of a page."""
    return [ET.fromstring(f'<svg xmlns:xlink="x"{drawn}') for drawn in re.findall(r"<svg(.*?</svg>)", page, re.DOTALL)]


def statistics_of(path, rules=None, decode=None):
    return measure_store(open_cache(path, allow_incomplete=True), rules or Rules(), decode=decode)


@pytest.fixture(scope="module")
def statistics(tmp_path_factory):
    store = build_store(tmp_path_factory.mktemp("page") / "store", spoiled=2)
    return statistics_of(store.path, Rules(outlier_factor=1.0))


def test_tables_show_the_figures_of_the_json(statistics):
    cells = Elements(render_page(statistics)).cells
    assert len(cells) > 300
    for layer in statistics["layers"]:
        assert figure_text(layer["norm"]["mean"]) in cells
        assert figure_text(layer["channels"]["energy_share"]["top_1"], "percent") in cells
        assert figure_text(layer["exponents"]["max"], "power") in cells
    for item in statistics["vocabulary"]["all"]["top"]:
        assert figure_text(item["share"], "percent") in cells


def test_nothing_is_loaded_from_elsewhere_and_there_is_no_script(statistics):
    page = Elements(render_page(statistics))
    assert not page.names() & {"script", "img", "iframe", "object", "embed", "audio", "video"}
    assert [attributes["href"] for _, attributes in page.found if "href" in attributes] == ["data:,"]
    assert all(attributes.get("xlink:href", "#")[0] == "#" for _, attributes in page.found)
    assert not [name for _, attributes in page.found for name in attributes if name.startswith("on") or name == "src"]


def test_texts_from_the_store_are_inert(tmp_path):
    store = build_store(
        tmp_path / INJECTED.replace("/", "_"), fields={"manifest": {"pad_token_id": 5, "target_model": INJECTED}}
    )
    rules = Rules(outlier_factor=1.0)
    statistics = statistics_of(store.path, rules, lambda ids: [INJECTED for _ in ids])
    counts = dict.fromkeys(("samples", "tokens", "token_share", "mean_length", "supervised", "supervised_share"), 1)
    statistics["sources"] = [{"name": INJECTED, **counts}]
    page = render_page(statistics)
    assert not Elements(page).names() & {"script", "img"}
    assert page.count("&lt;script&gt;") > 60


def test_plots_have_a_text_for_who_cannot_see_them(statistics):
    page = Elements(render_page(statistics))
    plots = [attributes for name, attributes in page.found if name == "svg" and "plot" in str(attributes.get("class"))]
    assert len(plots) == 5
    assert all(plot["role"] == "img" and len(str(plot["aria-label"])) > 40 for plot in plots)


def test_a_growing_store_says_so(tmp_path):
    page = render_page(statistics_of(build_store(tmp_path / "some", without_shards=(0,)).path))
    assert "This store is growing" in page
    page = render_page(statistics_of(build_store(tmp_path / "none", without_shards=(0, 1, 2)).path))
    assert "No captured states were read" in page


def test_a_draw_says_so(tmp_path):
    store = build_store(tmp_path)
    assert "A random part of the store was read" in render_page(statistics_of(store.path, Rules(samples=2)))


@pytest.mark.parametrize(
    ("made", "rules"),
    [
        ({}, Rules((), last=False)),
        ({}, Rules(())),
        ({}, Rules((2,), last=False)),
        ({}, Rules((2, 5))),
        ({"lengths": (1,), "shape": Shape(hidden_size=1)}, Rules()),
        ({"lengths": (1, 1, 1), "shape": Shape(hidden_size=1)}, Rules()),
        ({"lengths": (1,), "spoiled": 0, "shape": Shape(layer_ids=(1, 2))}, Rules()),  # no finite token
    ],
    ids=str,
)
def test_stores_and_choices_of_hardly_anything_have_a_page_too(tmp_path, made, rules):
    statistics = statistics_of(build_store(tmp_path, **made).path, rules)
    assert "</html>" in render_page(statistics)
    assert "spoiled" not in made or statistics["layers"][0]["norm"]["mean"] is None


def test_a_vocabulary_of_known_size_has_shares(tmp_path):
    fields = {"manifest": {"pad_token_id": 5, "target_vocab_size": 1000}}
    statistics = statistics_of(build_store(tmp_path, fields=fields).path)
    assert statistics["vocabulary"]["all"]["share_used"] == 78 / 1000
    assert statistics["vocabulary"]["all"]["coverage"][0]["ids"] == 100
    render_page(statistics)


def test_bars_are_as_high_as_their_counts(statistics):
    lengths = plots_of(render_page(statistics))[0]
    heights = []
    for path in lengths.iter("path"):
        if "fill: #0072b2" in path.get("style", ""):
            ups = [float(number) for number in re.findall(r"[ML] \S+ (\S+)", path.get("d", ""))]
            heights.append(max(ups) - min(ups))
    counts = statistics["lengths"]["histogram"]["counts"]
    assert heights == pytest.approx([max(heights) * count / max(counts) for count in counts], abs=0.01)


def test_every_layer_has_a_line_of_its_own_colour_and_the_legend_has_it_too(statistics):
    page = render_page(statistics)
    channels = ET.tostring(plots_of(page)[2], encoding="unicode")
    colours = re.findall(r'<li><span style="background:(#\w+)"></span>(?:layer|last)', page)
    assert len(set(colours)) == len(statistics["layers"])
    assert all(f"stroke: {colour}" in channels for colour in colours)


def test_plots_are_drawn_in_the_colour_of_the_pages_text(statistics):
    for plot in plots_of(render_page(statistics)):
        texts = list(plot.iter("text"))
        assert texts
        assert all("currentColor" in text.get("style", "") for text in texts)
        assert not [path for path in plot.iter("path") if "#ffffff" in path.get("style", "")]
