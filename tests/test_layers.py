"""Imports point one way: docs/design.md, section 7."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "dspark_store"
BELOW = {
    "format": set(),
    "writers": {"format"},
    "readers": {"format"},
    "target": {"format"},
    "sources": {"format"},
    "draft": {"format"},
    "precompute": {"sources", "target", "writers", "readers", "format"},
    "training": {"draft", "precompute", "sources", "target", "writers", "readers", "format"},
    "evaluation": {"training", "draft", "precompute", "writers", "sources", "target", "readers", "format"},
    "inspection": {"precompute", "sources", "target", "writers", "readers", "format"},
    "compat": {"precompute", "sources", "target", "writers", "readers", "format"},
}
BELOW["cli"] = set(BELOW) - {"draft"}
GROUND = {"settings", "text", "progress"}
"""Modules that every room may import."""
DOORS = {"train.py", "evaluate.py", "precompute/__main__.py"}
"""What `python -m` runs: it calls the command of the same name."""


def imported(module: Path) -> set[str]:
    """Return the parts of the package that a module imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {name.split(".")[1] for name in names if name.startswith("dspark_store.")}


@pytest.mark.parametrize("part", BELOW)
def test_a_part_imports_only_what_is_below_it(part):
    modules = [path for path in sorted((PACKAGE / part).rglob("*.py")) if str(path.relative_to(PACKAGE)) not in DOORS]
    assert modules
    for module in modules:
        assert imported(module) <= {part} | BELOW[part] | GROUND, module.name


def test_what_every_room_may_import_imports_no_room():
    assert [name for name in sorted(GROUND) if imported(PACKAGE / f"{name}.py")] == []


def test_every_module_is_a_room_the_ground_or_a_door():
    names = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert names - {"__init__", "__pycache__"} == set(BELOW) | GROUND | {"train", "evaluate"}


def test_the_format_knows_no_model_library():
    for module in (PACKAGE / "format").rglob("*.py"):
        text = module.read_text()
        assert "import transformers" not in text
        assert "from transformers" not in text
