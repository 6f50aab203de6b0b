"""The documentation: its snippets and commands run, and what it names is there.

A fenced block behind the comment ``<!-- not run: why -->`` is neither run nor parsed. Commands under ``torchrun`` are
parsed, and their ranks counted; the others run, on a tiny target in the place of the one that they name.
"""

import contextlib
import importlib
import importlib.util
import re
import runpy
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import dspark_store
from dspark_store.cli import main as dspark_store_command
from dspark_store.precompute.__main__ import main as precompute
from dspark_store.precompute.config import parse_arguments
from dspark_store.precompute.settings import settings
from dspark_store.target.parallel import ParallelPlan
from tests.tiny import HIDDEN_SIZE, save_target_dir, tiny_qwen3, write_chats

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [page.name for page in PAGES]
BLOCK = re.compile(
    r"^(?P<skip><!-- not run: .+ -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
PRECOMPUTE = "dspark_store.precompute"
# Of the parsers themselves, of `dspark-store tokens`, and of Slurm.
OTHER_FLAGS = {"help", "config"} | {"rows", "report", "tokenizer"} | {"cpus-per-task", "requeue", "signal"}


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: where it begins in its page, counted in lines from 0, its language and its text."""

    page: str
    line: int
    language: str
    text: str

    @property
    def commands(self) -> Iterator[list[str]]:
        for line in self.text.replace("\\\n", " ").splitlines():
            yield shlex.split(line, comments=True)


def blocks(page: Path, *languages: str) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = [(text[: match.start("text")].count("\n"), match) for match in BLOCK.finditer(text)]
    return [
        Block(page.name, line, match["language"], match["text"])
        for line, match in found
        if match["language"] in languages and not match["skip"]
    ]


BASH = [block for page in PAGES for block in blocks(page, "bash")]
COMMANDS = [(block, words) for block in BASH for words in block.commands if words]
PRECOMPUTES = [(block, words) for block, words in COMMANDS if PRECOMPUTE in words]


def arguments_of(words: list[str]) -> list[str]:
    return words[words.index(PRECOMPUTE) + 1 :]


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """A directory with what the commands expect: the chats, the YAML files of the pages, and a tiny target."""
    directory = tmp_path_factory.mktemp("stage")
    save_target_dir(directory / "target", tiny_qwen3(max_position_embeddings=4096))
    write_chats(directory / "chats.jsonl", 20)
    for block in (block for page in PAGES for block in blocks(page, "yaml")):
        name = block.text.splitlines()[0].removeprefix("# ")
        (directory / name).write_text(block.text, encoding="utf-8")
    return directory


@pytest.fixture
def on_stage(stage, tmp_path):
    """Make a fresh copy of the stage the working directory."""
    shutil.copytree(stage, tmp_path, dirs_exist_ok=True)
    with contextlib.chdir(tmp_path):
        yield tmp_path


def run_commands(block):
    """Run those commands of a block that need one process; return how many they are."""
    ran = 0
    for words in block.commands:
        if words[:3] == ["python", "-m", PRECOMPUTE]:
            assert precompute([*words[3:], "--target-model", "target", "--device", "cpu"]) == 0, words
        elif words[:1] == ["dspark-store"]:
            assert dspark_store_command(words[1:]) == 0, words
        else:
            continue
        ran += 1
    return ran


@pytest.fixture(scope="module")
def readme_store(stage, tmp_path_factory):
    """A directory in which the README's commands were run; its store is the one of all Python snippets."""
    directory = tmp_path_factory.mktemp("readme")
    shutil.copytree(stage, directory, dirs_exist_ok=True)
    with contextlib.chdir(directory):
        assert sum(run_commands(block) for block in blocks(PAGES[0], "bash")) == 1
    return directory


def runnable(page: str) -> list[Block]:
    starts = (["python", "-m", PRECOMPUTE], ["dspark-store"])
    mine = [block for block in BASH if block.page == page]
    return [
        block for block in mine if any(words[: len(start)] == start for words in block.commands for start in starts)
    ]


@pytest.mark.parametrize("block", runnable("precompute.md"), ids=lambda block: f"line {block.line}")
def test_the_commands_for_one_process_run(block, on_stage, capsys):
    assert run_commands(block) > 0
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("block", "words"),
    PRECOMPUTES,
    ids=[f"{block.page} {' '.join(arguments_of(words))}" for block, words in PRECOMPUTES],
)
def test_every_precompute_command_is_understood_and_shares_out_its_ranks(block, words, on_stage):
    config = parse_arguments(arguments_of(words))
    config.check()
    ranks = 1
    if "torchrun" in words:
        launcher = get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
        nodes = re.search(r"^#SBATCH --nodes=(\d+)$", block.text, re.MULTILINE)
        ranks = int(launcher.nproc_per_node) * int(nodes[1] if nodes else launcher.nnodes.split(":")[0])
    plan = ParallelPlan(
        ranks, fsdp=config.fsdp_size or 1, tp=config.tp_size, ep=config.ep_size, pp=config.pp_size
    )  # refuses what does not divide
    assert plan.crews >= 1


def test_the_shell_scripts_are_shell_scripts():
    for block in BASH:
        checked = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
        assert (checked.returncode, checked.stderr) == (0, ""), block


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_the_python_snippets_run_one_after_the_other(page, readme_store, tmp_path):
    lines: list[str] = []
    for block in blocks(page, "python"):
        lines += [""] * (block.line - len(lines)) + block.text.splitlines()
    script = tmp_path / f"{page.stem}.py"
    script.write_text("\n".join(lines), encoding="utf-8")
    steps = []
    with contextlib.chdir(readme_store):
        left = runpy.run_path(str(script), {"step": lambda *tensors: steps.append(tensors)})
    if page.name == "README.md":
        assert left["batch"]["target_hidden_states"].shape == (3, 2, 256, HIDDEN_SIZE)
    else:
        assert [tuple(tensor.shape) for tensor in steps[0]] == [
            (8, 4096),
            (8, 4096),
            (8, 4096, 3 * HIDDEN_SIZE),
            (8, 4096, HIDDEN_SIZE),
        ]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_flag_is_one_of_a_command(page):
    text = re.sub(r"^#SBATCH.*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    known = {name.replace("_", "-") for name in settings()} | OTHER_FLAGS
    known |= {option[2:].replace("_", "-") for action in get_args_parser()._actions for option in action.option_strings}
    for module in re.findall(r"python -m (benchmarks\.\w+)", text):
        source = ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
        known |= set(re.findall(r'"--([a-z-]+)"', source))
    assert set(re.findall(r"(?<![\w`-])`?--([a-z][a-z-]*[a-z])", text)) - known == set()


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
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


def test_the_design_names_every_module_where_it_is():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    (tree,) = (block for block in blocks(ROOT / "docs" / "design.md", "") if "pyproject.toml" in block.text)
    assert tree.text in text
    named: dict[str, set[str]] = {}
    folder = ""
    for line in tree.text.splitlines():
        heading = re.match(r"\s*(\w+)/\s", line)
        folder = heading[1] if heading else folder
        named.setdefault(folder, set()).update(re.findall(r"(?<![\w/.])(\w+\.py)\b", line))
    for folder in ("format", "precompute", "sources", "target", "writers", "readers"):
        there = {path.name for path in (ROOT / "dspark_store" / folder).glob("*.py")} - {"__init__.py"}
        assert named[folder] == there, folder
