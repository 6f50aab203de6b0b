"""The documentation site is built, and nothing in it is worth a warning."""

from tests.processes import ROOT, run_python


def test_the_site_is_built_without_a_warning(tmp_path):
    sphinx = ("-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-d", tmp_path / "trees")
    built = run_python(*sphinx, "docs", tmp_path / "site", cwd=ROOT)
    assert (built.returncode, built.stderr) == (0, "")
    pages = {page.relative_to(tmp_path / "site").with_suffix(".md") for page in (tmp_path / "site").rglob("*.html")}
    assert {page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")} <= pages
    api = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    assert "Open a store for reading" in api


def test_every_figure_is_on_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    for figure in (ROOT / "docs" / "figures").iterdir():
        assert f"figures/{figure.name})" in text, figure.name


def test_every_public_name_is_on_the_page_of_the_api():
    import dspark_store

    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert [name for name in dspark_store.__all__ if f":: dspark_store.{name}\n" not in text] == []
