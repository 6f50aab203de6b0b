"""``dspark-store``: which commands there are, and what all of them have in common."""

import re
from pathlib import Path

import pytest

from dspark_store import __version__
from dspark_store.cli.main import COMMANDS, main
from dspark_store.cli.options import EXIT_CODES, OneLineParser, add_settings
from dspark_store.precompute.settings import settings
from tests.processes import run_python
from tests.stores import build_store


def test_a_directory_without_a_store_is_one_line_and_exit_code_2(tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: manifest not found")


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("precompute", "required but not given: --target-model"),
        ("train", "required but not given: --output-dir"),
        ("evaluate", "the following arguments are required: draft"),
    ],
)
def test_programs_of_their_own_are_commands_too(name, missing, capsys):
    assert main([name]) == 2
    assert missing in capsys.readouterr().err


def test_what_is_nearly_a_flag_is_a_mistake(tmp_path, capsys):
    for words in (["evaluate", "draft", "--target", "t", "--stor", "s"], ["info", str(tmp_path), "--jso"]):
        assert main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")


@pytest.mark.parametrize(
    ("words", "wrong", "mend"),
    [
        (["verfy", "store"], "invalid choice: 'verfy'", "the nearest is 'verify' "),
        (["info", "store", "--jsno"], "unknown flag --jsno; ", "the nearest is --json "),
        (["precompute", "--tp-sise=2", "--codec", "none"], "unknown flag --tp-sise; ", "the nearest is --tp-size "),
        (["precompute", "--codec", "dens"], "--codec: invalid choice: 'dens'", "the nearest is 'dense' "),
    ],
)
def test_an_unknown_command_flag_or_choice_is_one_line_with_the_nearest(words, wrong, mend, capsys):
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert wrong in line
    assert mend in line


def test_every_program_tells_its_version(capsys):
    for words in ([], *([name] for name in COMMANDS)):
        with pytest.raises(SystemExit) as end:
            main([*words, "--version"])
        assert end.value.code == 0
        assert capsys.readouterr().out == f"dspark-store {__version__}\n"


def test_a_list_of_numbers_takes_spaces_and_commas():
    known = settings()
    for words in (["-1,15,22"], ["-1,", "15,22"], ["-1", "15", "22"]):
        parser = OneLineParser()
        add_settings(parser, known)
        given = parser.parse_args(["--target-layer-ids", *words, "--resume"])
        assert given.target_layer_ids == [-1, 15, 22]
        assert given.resume


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_page(name, capsys):
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert f"dspark-store {name}" in capsys.readouterr().out


def test_the_pages_have_the_exit_codes_that_every_help_ends_with(capsys):
    page = (Path(__file__).parents[2] / "docs" / "commands" / "index.md").read_text()
    table = [(code.strip(), text.strip()) for code, text in re.findall(r"^\| (\d+) \|(.*)\|$", page, re.MULTILINE)]
    lines = re.sub(r"\n {7}", " ", EXIT_CODES).splitlines()[1:]
    assert [(code, text.replace("`", "")) for code, text in table] == [tuple(line.split(maxsplit=1)) for line in lines]
    for words in ([], *([name] for name in COMMANDS)):
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        assert capsys.readouterr().out.endswith(f"\n\n{EXIT_CODES}\n")


def test_no_help_page_imports_what_is_slow():
    lines = f"""
import contextlib, io, sys
from dspark_store import evaluate, train
from dspark_store.cli.main import main
from dspark_store.precompute import __main__ as precompute
out = io.StringIO()
commands = [(main, words) for words in {[[], *([name] for name in COMMANDS)]}]
for program, words in [*commands, (precompute.main, []), (train.main, []), (evaluate.main, [])]:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(out):
        program([*words, "--help"])
print(out.getvalue().count("exit codes:"))
print(sorted({{"torch", "transformers", "zarr", "dask", "datasets", "pandas", "matplotlib"}} & sys.modules.keys()))
"""
    done = run_python("-c", lines)
    assert done.stdout == f"{1 + len(COMMANDS) + 3}\n[]\n", done.stderr


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("precompute", ["data", "target", "store", "ranks", "recovery", "advanced"]),
        ("train", ["data", "draft", "training", "recovery", "advanced"]),
        ("evaluate", ["data", "target", "answers"]),
    ],
)
def test_flags_come_in_groups_with_their_defaults(name, groups, capsys):
    with pytest.raises(SystemExit):
        main([name, "--help"])
    text = capsys.readouterr().out
    assert re.findall(r"^([a-z]+):$", text.partition("options:")[2], re.MULTILINE) == groups
    assert "(default: " in text


def test_reading_a_store_imports_no_other_slow_library_than_torch_and_zarr(tmp_path):
    store = build_store(tmp_path / "store").path
    lines = f"""
import sys
import dspark_store
dspark_store.open_cache({str(store)!r})[0]
print(sorted({{"torch", "zarr", "transformers", "dask", "datasets", "pandas"}} & sys.modules.keys()))
"""
    done = run_python("-c", lines)
    assert done.stdout == "['torch', 'zarr']\n", done.stderr


def test_a_surprise_is_one_line_and_no_verdict_about_a_store(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dspark_store.cli.info.run", lambda given: [].pop())
    assert main(["info", str(tmp_path)]) == 3
    assert capsys.readouterr().err == "error: IndexError: pop from empty list\n"
