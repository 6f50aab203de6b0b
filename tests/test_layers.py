"""Imports point one way: docs/design.md, section 7."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "dspark_store"
ALLOWED = {
    "format": {"format"},
    "writers": {"writers", "format"},
    "readers": {"readers", "format"},
    "target": {"target", "format"},
    "sources": {"sources", "format"},
    "draft": {"draft", "format"},
    "precompute": {"precompute", "compat", "sources", "target", "writers", "readers", "format"},
    "training": {"training", "draft", "precompute", "compat", "sources", "target", "writers", "readers", "format"},
    "evaluation": {"evaluation", "draft", "sources", "target", "readers", "format"},
    "inspection": {"inspection", "precompute", "sources", "target", "writers", "readers", "format"},
    "cli": {
        "cli",
        "compat",
        "training",
        "inspection",
        "precompute",
        "sources",
        "target",
        "writers",
        "readers",
        "format",
    },
}


def imported(module: Path) -> set[str]:
    """Return the parts of the package that a module imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {name.split(".")[1] for name in names if name.startswith("dspark_store.")}


@pytest.mark.parametrize("part", ALLOWED)
def test_a_part_imports_only_what_is_below_it(part):
    modules = sorted((PACKAGE / part).rglob("*.py"))
    assert modules
    for module in modules:
        assert imported(module) <= ALLOWED[part], module.name


def test_the_format_knows_no_model_library():
    for module in (PACKAGE / "format").rglob("*.py"):
        text = module.read_text()
        assert "import transformers" not in text
        assert "from transformers" not in text
