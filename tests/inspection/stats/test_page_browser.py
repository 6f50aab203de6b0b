"""The page in headless Chromium, on a phone and on a desk: no error, no request, nothing cut off.

Chromium is the system's, since a page should work in what people have. Without one these tests are skipped with a
message, or fail where DSPARK_REQUIRE_CHROMIUM is set, as CI does.
"""

import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dspark_store.cli import stats as stats_command
from dspark_store.cli.main import main
from tests.inspection.stats.test_page import INJECTED
from tests.stores import build_store

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PAGES = ("complete", "growing", "tokens only", "drawn")
SIZES = {"phone": (360, 740), "desk": (1280, 800)}
CUT_OFF = """() => [...document.querySelectorAll('svg.plot, svg.plot text')].filter(item => {
    const box = item.getBoundingClientRect();
    return !box.width || !box.height || box.left < 0 || box.right > window.innerWidth;
}).map(item => item.outerHTML.slice(0, 200))"""


def absent(what: str) -> NoReturn:
    if os.environ.get("DSPARK_REQUIRE_CHROMIUM"):
        pytest.fail(f"DSPARK_REQUIRE_CHROMIUM is set, but {what}")
    pytest.skip(f"{what}, so the page was not looked at")


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        absent("the package playwright, which drives Chromium, is not installed")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        absent("there is no chromium on PATH (apt-get install chromium)")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Statistics of stores whose path, target and tokens would run a script if they could."""
    folder = tmp_path_factory.mktemp("browser")
    name = INJECTED.replace("/", "_")
    fields = {"manifest": {"pad_token_id": 5, "target_model": INJECTED, "target_vocab_size": 1000}}
    jobs: dict[str, tuple[dict[str, Any], list[str]]] = {
        "complete": ({"spoiled": 2, "shared_last": False}, ["--outlier-factor", "1"]),
        "growing": ({"without_shards": (1,)}, []),
        "tokens only": ({"without_shards": (0, 1, 2)}, []),
        "drawn": ({}, ["--samples", "3", "--layers", "2"]),
    }
    assert set(jobs) == set(PAGES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            stats_command, "_decoder", lambda cache, chosen: lambda ids: [f"{INJECTED} {token}" for token in ids]
        )
        for page, (options, words) in jobs.items():
            store = build_store(folder / "stores" / page / name, fields=fields, **options).path
            assert main(["stats", str(store), "--output", str(folder / page), *words]) == 0
    return folder


class Visit:
    """A page that was opened, and all that it complained of or asked for."""

    def __init__(self, browser, path: Path, size: str, scheme: str) -> None:
        width, height = SIZES[size]
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, is_mobile=size == "phone", offline=True
        )
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", self._dismiss)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto((path / "stats.html").as_uri())
        self.page.evaluate("document.querySelectorAll('details').forEach(item => { item.open = true })")

    def _dismiss(self, dialog) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()


@pytest.fixture
def visit(browser, folder):
    visits = []

    def open_page(name, size, scheme="light"):
        visits.append(Visit(browser, folder / name, size, scheme))
        return visits[-1]

    yield open_page
    for opened in visits:
        opened.context.close()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PAGES)
def test_the_page_has_no_error_asks_for_nothing_and_fits(visit, folder, name, size):
    opened = visit(name, size)
    page = opened.page
    assert opened.complaints == []
    assert opened.requests == [(folder / name / "stats.html").as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") == SIZES[size][0]
    assert page.evaluate("[...document.images].filter(image => !image.naturalWidth).length") == 0
    assert page.evaluate(CUT_OFF) == []
    plots = {"complete": 5, "growing": 5, "tokens only": 2, "drawn": 4}
    assert page.locator("svg.plot").count() == plots[name]


@pytest.mark.parametrize("size", SIZES)
def test_the_text_of_plots_can_be_read(visit, size):
    heights = visit("complete", size).page.evaluate(
        "[...document.querySelectorAll('svg.plot text')].map(text => text.getBoundingClientRect().height)"
    )
    assert min(heights) > 9


def test_light_and_dark_are_two_sets_of_colours(visit):
    grounds = {
        scheme: visit("complete", "phone", scheme).page.evaluate("getComputedStyle(document.body).backgroundColor")
        for scheme in ("light", "dark")
    }
    assert grounds == {"light": "rgb(251, 251, 250)", "dark": "rgb(20, 23, 27)"}
