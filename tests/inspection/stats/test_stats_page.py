"""The page without a browser: every figure is the JSON's, everything is escaped, nothing comes from elsewhere."""

import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from dspark_store.inspection.stats.figures import Figures, figure_text
from dspark_store.inspection.stats.report import Rules, measure_store
from dspark_store.inspection.stats.stats_page import render_page
from dspark_store.inspection.stats.survey import Selection
from dspark_store.readers.cache import open_cache
from tests.stores import Shape, build_store

INJECTED = "</title><script>alert('x')</script><img src=x onerror=alert(1)>"


class Elements(HTMLParser):
    """The elements of a page: (name, attributes), and the texts of the figures."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, Any]]] = []
        self.texts: list[str] = []
        self._in_figure = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._in_figure = tag == "data"

    def handle_data(self, data):
        if self._in_figure:
            self.texts.append(data)
            self._in_figure = False

    def names(self):
        return {name for name, _ in self.found}


def statistics_of(path, rules=None, decode=None):
    return measure_store(open_cache(path, allow_incomplete=True), rules or Rules(), decode=decode)


@pytest.fixture(scope="module")
def statistics(tmp_path_factory):
    store = build_store(tmp_path_factory.mktemp("page") / "store", spoiled=2)
    return statistics_of(store.path, Rules(outlier_factor=1.0))


def test_every_figure_is_the_one_in_the_json(statistics):
    page, figures = Elements(render_page(statistics)), Figures(statistics)
    shown = [attributes for name, attributes in page.found if name == "data"]
    assert len(shown) == len(page.texts) > 300
    for attributes, text in zip(shown, page.texts, strict=True):
        value = figures.value(attributes["data-json"])
        assert json.loads(attributes["value"]) == value
        assert text == figure_text(value, attributes["data-form"])


def test_nothing_is_loaded_from_elsewhere_and_there_is_no_script(statistics):
    page = Elements(render_page(statistics))
    assert not page.names() & {"script", "img", "iframe", "object", "embed", "audio", "video"}
    assert [attributes["href"] for _, attributes in page.found if "href" in attributes] == ["data:,"]
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
    assert "A random part of the store was read" in render_page(statistics_of(store.path, Rules(Selection(samples=2))))


@pytest.mark.parametrize("layers", [(), (2,), (2, 5)])
def test_a_choice_of_layers_has_a_page_too(tmp_path, layers):
    store = build_store(tmp_path)
    for last in (False, True):
        render_page(statistics_of(store.path, Rules(Selection(layers, last))))


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1)])
def test_stores_of_hardly_anything_have_a_page_too(tmp_path, lengths):
    store = build_store(tmp_path, lengths=lengths, shape=replace(Shape(), hidden_size=1))
    render_page(statistics_of(store.path))


def test_a_store_without_one_finite_token_has_a_page_too(tmp_path):
    store = build_store(tmp_path, lengths=(1,), spoiled=0, shape=Shape(layer_ids=(1, 2)))
    statistics = statistics_of(store.path)
    assert Figures(statistics).value("layers.0.norm.mean") is None
    render_page(statistics)


def test_a_vocabulary_of_known_size_has_shares(tmp_path):
    fields = {"manifest": {"pad_token_id": 5, "target_vocab_size": 1000}}
    statistics = statistics_of(build_store(tmp_path, fields=fields).path)
    assert Figures(statistics).value("vocabulary.all.share_used") == 78 / 1000
    assert Figures(statistics).value("vocabulary.all.coverage.0.ids") == 100
    render_page(statistics)


def test_lines_go_where_the_json_says(statistics):
    figures = Figures(statistics)
    drawn = [attributes for name, attributes in Elements(render_page(statistics)).found if name == "polyline"]
    assert len(drawn) == 5
    for prefix, least in (("layers", None), ("vocabulary", 1.0)):
        mine = [line for line in drawn if line["data-json"].startswith(prefix)]
        values = [figures.numbers(line["data-to"]) for line in mine]
        low, high = least or min(map(min, values)), max(map(max, values))
        for line, heights in zip(mine, values, strict=True):
            points = [float(point.split(",")[1]) for point in line["points"].split()]
            spread = math.log(high / low)
            expected = [100 - 100 * math.log(value / low) / spread if spread else 50 for value in heights]
            assert points == pytest.approx(expected, abs=0.001)
