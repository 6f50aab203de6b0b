"""What the pages name is there: flags, modules, files, targets of make."""

import importlib.util
import re

import pytest
from torch.distributed.run import get_args_parser

import dspark_store
from dspark_store.cli.main import COMMANDS
from dspark_store.cli.options import OneLineParser
from dspark_store.precompute.settings import settings
from dspark_store.settings import settings_of
from dspark_store.training.settings import TrainConfig
from tests.docs.pages import PAGES, name_of
from tests.processes import ROOT

PACKAGE = ROOT / "dspark_store"
OTHER_FLAGS = {"help", "config", "cpus-per-task", "requeue", "signal"}  # of the parsers themselves, and of Slurm
GONE = {"lease-seconds"}  # named in CHANGELOG.md as gone


def command_flags():
    """Return the flags of all commands of `dspark-store`."""
    flags = set()
    for entry in COMMANDS.values():
        parser = OneLineParser()
        entry.load().add_arguments(parser)
        flags |= {option[2:] for action in parser._actions for option in action.option_strings}
    return flags


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_flag_is_one_of_a_command(page):
    text = re.sub(r"^#SBATCH.*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    known = {name.replace("_", "-") for name in settings()} | OTHER_FLAGS | GONE | command_flags()
    known |= {name.replace("_", "-") for name in settings_of(TrainConfig)}
    known |= {option[2:].replace("_", "-") for action in get_args_parser()._actions for option in action.option_strings}
    for module in re.findall(r"python -m (benchmarks\.\w+)", text):
        for place in (ROOT.joinpath(*module.split(".")).with_suffix(".py"), ROOT / "benchmarks" / "flags.py"):
            known |= set(re.findall(r'"--([a-z0-9-]+)"', place.read_text(encoding="utf-8")))
    assert set(re.findall(r"(?<![\w`-])`?--([a-z][a-z0-9-]*[a-z0-9])", text)) - known == set()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_module_file_and_target_of_make_is_there(page):
    text = page.read_text(encoding="utf-8")
    modules = set(re.findall(r"(?<![\w.])-m ((?:dspark_store|benchmarks)[\w.]*)", text))
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    names = set(re.findall(r"(?<![\w.])dspark_store\.([a-zA-Z]\w*)", text))
    parts = {name for name in names if importlib.util.find_spec(f"dspark_store.{name}")}
    assert [name for name in names - parts if not hasattr(dspark_store, name)] == []
    paths = set(re.findall(r"`((?:dspark_store|docs|tests|benchmarks|writers|readers|\.ci)/[\w./-]+)`", text))
    assert [path for path in paths if not (ROOT / path).exists()] == []
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE)) - targets == set()


def test_the_design_names_every_room():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rooms = {init.parent.name for init in PACKAGE.glob("*/__init__.py")} | {"readers", "writers"}
    assert [room for room in rooms if not re.search(rf"`(?:dspark_store/)?{room}`", text)] == []
