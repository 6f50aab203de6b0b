"""Every block that can be pasted is run, or a comment before it says that it is not, and why.

The target that a command names is replaced by a tiny one, a training by one step. Every shell block runs in a fresh
directory with the chats, the YAML files of the pages and, for the pages of the commands, a store.
"""

import contextlib
import re
import shutil
import subprocess
import sys
from collections import Counter

import pytest
import yaml
from torch.distributed.run import get_args_parser

from dspark_store.cli.main import main as dspark_store_command
from dspark_store.cli.precompute import parse_arguments
from dspark_store.sources.megatron.builder import PairBuilder
from dspark_store.target.parallel import ParallelPlan
from tests.docs.pages import PAGES, RUN_LANGUAGES, all_blocks, blocks, name_of
from tests.processes import ROOT
from tests.tiny import HIDDEN_SIZE, save_target_dir, tiny_qwen3, write_chats

PRECOMPUTE = "dspark_store.precompute"
SMALL_TRAINING = [
    "--max-steps",
    "1",
    "--draft-layers",
    "1",
    "--num-anchors",
    "2",
    "--batch-size",
    "1",
    "--device",
    "cpu",
]
MARKS = {
    "README.md": 1,
    "docs/benchmarks.md": 1,
    "docs/chunk_sizes.md": 1,
    "docs/commands/import.md": 1,
    "docs/commands/verify.md": 1,
    "docs/index.md": 1,
    "docs/precompute.md": 5,
    "docs/sources.md": 1,
    "docs/tutorial.md": 1,
}
"""How many blocks of each page are not run: each needs what a test does not have, such as eight GPUs, or a network."""
TUTORIAL = ROOT / "docs" / "tutorial.md"
IN_ORDER = {"README.md", name_of(TUTORIAL)}
"""Pages whose commands build on each other."""
RUN = [block for block in all_blocks("bash") if not block.reason and block.page not in IN_ORDER]


def precompute_words(words):
    """Return the arguments of a precompute, in either way to write it; None for another command."""
    if words[:2] == ["dspark-store", "precompute"]:
        return words[2:]
    return words[words.index(PRECOMPUTE) + 1 :] if PRECOMPUTE in words else None


RANKED = [
    (block, command.words)
    for block in all_blocks("bash")
    for command in block.commands
    if precompute_words(command.words) is not None
]


def test_the_blocks_that_are_not_run_are_counted():
    assert Counter(block.page for block in all_blocks(*RUN_LANGUAGES) if block.reason) == MARKS


def test_a_block_that_can_be_pasted_names_its_language():
    languages = {
        match for page in PAGES for match in re.findall(r"^```([^\s`]+)$", page.read_text("utf-8"), re.MULTILINE)
    }
    assert languages <= {*RUN_LANGUAGES, "text", "{toctree}", "{eval-rst}"}
    assert not [block for block in all_blocks("toml") if not block.reason]


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """A directory with what the commands expect: the chats, the YAML files of the pages, and a tiny target."""
    directory = tmp_path_factory.mktemp("stage")
    save_target_dir(directory / "target", tiny_qwen3(max_position_embeddings=4096))
    write_chats(directory / "chats.jsonl", 20)
    (directory / "prompts.txt").write_text("What is a tide?\nName a colour.\n", encoding="utf-8")
    for block in all_blocks("yaml"):
        name = block.text.splitlines()[0].removeprefix("# ")
        (directory / name).write_text(block.text, encoding="utf-8")
    return directory


def with_tiny_target(words):
    """Replace the target or tokenizer that a command names."""
    named = {"--target-model", "--tokenizer"}
    return ["target" if before in named else word for before, word in zip(["", *words], words, strict=False)]


def run(words):
    """Run a command in this process; return its exit code."""
    if precompute_words(words) is not None:
        words = [*words, "--target-model", "target", "--device", "cpu"]
    if words[:2] == ["dspark-store", "train"]:
        words = [*words, *SMALL_TRAINING]
    if words[:2] == ["dspark-store", "evaluate"]:
        words = [*words, "--samples", "1", "--max-new-tokens", "4"]
    assert words[0] == "dspark-store", f"{words} can be neither run here nor left unmarked"
    if words[1] == "estimate" and "--target-model" not in words and "--store" not in words:  # from its YAML
        words = [*words, "--target-model", "target"]
    try:
        return dspark_store_command(with_tiny_target(words[1:]))
    except SystemExit as end:  # of --help
        return end.code


def run_page(page, directory):
    """Run the commands of a page one after the other."""
    with contextlib.chdir(directory):
        for block in blocks(page, "bash"):
            for command in () if block.reason else block.commands:
                assert run(command.words) == command.exit_code, command.words


@pytest.fixture(scope="module")
def with_store(stage, tmp_path_factory):
    """A directory in which the README's commands were run, so that its store is there."""
    directory = tmp_path_factory.mktemp("readme")
    shutil.copytree(stage, directory, dirs_exist_ok=True)
    run_page(PAGES[0], directory)
    return directory


def test_the_commands_of_the_readme_run(with_store):
    assert (with_store / "store" / "zarr.json").exists()
    assert list((with_store / "draft" / "checkpoints").iterdir())


def test_the_tutorial_leads_from_prompts_to_a_draft_that_decodes(stage, tmp_path, capsys):
    shutil.copytree(stage / "target", tmp_path / "target")
    prompts = (TUTORIAL.with_suffix("") / "prompts.txt").read_text(encoding="utf-8").splitlines()
    (tmp_path / "docs" / "tutorial").mkdir(parents=True)
    (tmp_path / "docs" / "tutorial" / "prompts.txt").write_text("\n".join(prompts[:32]), encoding="utf-8")
    run_page(TUTORIAL, tmp_path)
    assert (tmp_path / "tutorial" / "training.png").read_bytes().startswith(b"\x89PNG")
    assert "steps of the target" in capsys.readouterr().out


@pytest.mark.parametrize("block", RUN, ids=str)
def test_the_commands_run(block, stage, with_store, tmp_path, capsys):
    made = with_store if block.page.startswith("docs/commands/") else stage
    shutil.copytree(made, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("draft"))
    with contextlib.chdir(tmp_path):
        for command in block.commands:
            assert run(command.words) == command.exit_code, (command.words, capsys.readouterr())
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("block", "words"), RANKED, ids=[f"{block} {' '.join(words[-4:])}" for block, words in RANKED])
def test_every_precompute_command_is_understood_and_shares_out_its_ranks(block, words, stage):
    with contextlib.chdir(stage):
        config = parse_arguments(precompute_words(words))
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


@pytest.mark.parametrize("block", all_blocks("bash"), ids=str)
def test_the_shell_blocks_are_shell_scripts(block):
    checked = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("block", all_blocks("yaml"), ids=str)
def test_the_yaml_files_are_configurations_or_sources(block, stage):
    """What the sources in them are is tested in tests/sources/test_page.py."""
    name = block.text.splitlines()[0].removeprefix("# ")
    assert name.endswith(".yaml")
    documents = list(yaml.safe_load_all(block.text))
    if all(set(document) == {"input_data"} for document in documents):
        return
    with contextlib.chdir(stage):
        parse_arguments(["-c", name]).check()


@pytest.fixture(scope="module")
def python_stage(with_store):
    """The store, one of a blend, and a pair: what the Python snippets open."""
    with contextlib.chdir(with_store):
        write_chats("more.jsonl", 8, seed=1)
        data = '[{"source": "chats.jsonl"}, {"source": "more.jsonl", "name": "code"}]'
        assert run(["dspark-store", "precompute", "--input-data", data, "--output-dir", "blended"]) == 0
        with PairBuilder("corpus/books") as books:
            books.add_document([7])
    return with_store


STEP = f"""def step(ids, mask, layers, last):
    assert ids.shape == mask.shape == (8, 4096)
    assert layers.shape == (8, 4096, {3 * HIDDEN_SIZE}) and last.shape == (8, 4096, {HIDDEN_SIZE})

"""
"""What docs/training.md leaves to its reader."""
CHECKS = {"README.md": f"assert batch['target_hidden_states'].shape == (3, 2, 256, {HIDDEN_SIZE})"}
"""What a page must have come to."""
PYTHON = [(page, number) for page in PAGES for number in range(len(blocks(page, "python")))]


@pytest.mark.parametrize(("page", "number"), PYTHON, ids=[f"{name_of(page)}:{number}" for page, number in PYTHON])
def test_a_python_snippet_ends_without_a_word_on_stderr(page, number, python_stage, tmp_path):
    """As a process of its own, after the blocks before it, which still holds all that it opened when it ends."""
    shown = blocks(page, "python")[: number + 1]
    assert not any(block.reason for block in shown)
    shutil.copytree(python_stage, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("draft"))
    script = tmp_path / "script.py"
    text = [STEP, *(block.text for block in shown), CHECKS.get(name_of(page), "")]
    script.write_text("\n".join(text), encoding="utf-8")
    ended = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
