"""The repository itself: the package's links, the search for a Python, what CI runs, and what no file may say."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.processes import ROOT, run_python

SYSTEM_PATH = "/usr/bin:/bin"


def write_script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def working_python(path: Path) -> Path:
    return write_script(path, f'exec "{sys.executable}" "$@"')


def old_python(path: Path) -> Path:
    return write_script(path, "exit 1")


def shim(path: Path) -> Path:
    return write_script(path, f'echo "pyenv: {path.name}: command not found" >&2; exit 127')


def system_tools(path: Path, *names: str) -> Path:
    """Make a directory in which some commands of this machine stand, and no others."""
    path.mkdir(parents=True, exist_ok=True)
    for name in names:
        found = shutil.which(name)
        assert found is not None, name
        (path / name).symlink_to(found)
    return path


def find_python(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the search with nothing on PATH but `tmp_path/bin`, and `tmp_path` as the home."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    finder = ["/bin/sh", str(ROOT / ".ci" / "python")]
    environment = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)} | environment
    return subprocess.run(finder, env=environment, capture_output=True, text=True)


def project_files() -> list[Path]:
    """Files that are tracked or could be: everything that git does not ignore, but for links and the licence."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    paths = [ROOT / os.fsdecode(name) for name in listed.split(b"\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink() and path.name != "LICENSE"]


@pytest.mark.parametrize("name", ["writers", "readers"])
def test_the_package_reaches_the_top_folders_through_relative_links(name: str) -> None:
    link = ROOT / "dspark_store" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    assert link.resolve() == ROOT / name


@pytest.mark.parametrize("name", ["writers", "readers"])
def test_the_linked_folders_are_importable_inside_the_package(name: str) -> None:
    printed = run_python("-c", f"import dspark_store.{name} as module; print(module.__file__)", check=True).stdout
    assert Path(printed.strip()) == ROOT / "dspark_store" / name / "__init__.py"


def test_every_folder_with_modules_is_a_package_and_so_is_installed() -> None:
    modules = [path.relative_to(ROOT) for path in project_files() if path.suffix == ".py"]
    folders = {path.parent for path in modules if path.parts[0] in {"dspark_store", "writers", "readers"}}
    assert [folder for folder in folders if not (ROOT / folder / "__init__.py").exists()] == []


def test_the_package_declares_its_types() -> None:
    assert (ROOT / "dspark_store" / "py.typed").exists()


def test_the_development_environment_holds_what_the_demo_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "gguf" in re.split(r"[\[\],]", project["optional-dependencies"]["dev"][0])


def test_a_shim_that_only_prints_an_error_is_passed_over(tmp_path: Path) -> None:
    shim(tmp_path / "bin" / "python3.14")
    old_python(tmp_path / "bin" / "python3.12")
    working_python(tmp_path / "bin" / "python3")
    assert find_python(tmp_path).stdout.strip() == sys.executable


def test_the_first_suitable_name_on_path_is_taken(tmp_path: Path) -> None:
    write_script(tmp_path / "bin" / "python3.13", "echo first")
    working_python(tmp_path / "bin" / "python3.12")
    assert find_python(tmp_path).stdout == "first\n"


def test_pyenvs_versions_are_searched_last(tmp_path: Path) -> None:
    shim(tmp_path / "bin" / "python3.12")
    old_python(tmp_path / ".pyenv" / "versions" / "3.12.0" / "bin" / "python")
    working_python(tmp_path / ".pyenv" / "versions" / "3.13.1" / "bin" / "python")
    assert find_python(tmp_path).stdout.strip() == sys.executable


def test_an_unsuitable_choice_is_an_error_and_not_replaced(tmp_path: Path) -> None:
    working_python(tmp_path / "bin" / "python3.12")
    finished = find_python(tmp_path, PYTHON=str(old_python(tmp_path / "mine")))
    assert (finished.returncode, finished.stdout) == (1, "")
    assert f"PYTHON={tmp_path / 'mine'} is not a Python >= 3.12" in finished.stderr


def test_a_suitable_choice_wins_over_the_path(tmp_path: Path) -> None:
    working_python(tmp_path / "bin" / "python3.12")
    chosen = write_script(tmp_path / "mine", "echo mine")
    assert find_python(tmp_path, PYTHON=str(chosen)).stdout == "mine\n"


def test_no_suitable_python_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    finished = find_python(tmp_path)
    assert (finished.returncode, finished.stdout) == (1, "")
    assert finished.stderr.count("\n") == 1
    assert "make PYTHON=" in finished.stderr


@pytest.mark.parametrize(("failing", "expected"), [("none", 0), ("lint", 1), ("test", 1), ("partnertest", 1)])
def test_ci_passes_only_when_lint_and_all_tests_do(tmp_path: Path, failing: str, expected: int) -> None:
    write_script(tmp_path / "make", f'echo "ran $1"; [ "$1" != {failing} ]')
    write_script(tmp_path / "chromium", "exit 0")
    environment = {"PATH": f"{tmp_path}:{SYSTEM_PATH}", "CI": "true"}
    finished = subprocess.run([ROOT / ".ci" / "run"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert finished.returncode == expected
    assert re.findall("^ran .*$", finished.stdout, re.MULTILINE) == ["ran lint", "ran test", "ran partnertest"]


def test_ci_forbids_the_tests_that_need_chromium_to_skip_themselves(tmp_path: Path) -> None:
    write_script(tmp_path / "make", 'echo "$1 with $DSPARK_REQUIRE_CHROMIUM"')
    write_script(tmp_path / "chromium", "exit 0")
    environment = {"PATH": f"{tmp_path}:{SYSTEM_PATH}"}
    finished = subprocess.run([ROOT / ".ci" / "run"], env=environment, capture_output=True, text=True)
    assert "test with 1\n" in finished.stdout


def find_chromium(tmp_path: Path, apt: str | None, *, root: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the search for Chromium where there is none, with `apt` as the body of apt-get."""
    tools = system_tools(tmp_path / "tools", "sh", "env", "tail")
    write_script(tools / "id", f"echo {0 if root else 1000}")
    write_script(tools / "sleep", "exit 0")
    write_script(tools / "sudo", 'echo "sudo $1" >> "$TRACE"; shift; exec "$@"')
    if apt is not None:
        write_script(tools / "apt-get", f'echo "apt-get $1" >> "$TRACE"\n{apt}')
    environment = {"PATH": str(tools), "TRACE": str(tmp_path / "trace")}
    return subprocess.run([ROOT / ".ci" / "chromium"], env=environment, capture_output=True, text=True)


def test_chromium_is_installed_from_apt_where_it_is_missing(tmp_path: Path) -> None:
    assert find_chromium(tmp_path, "exit 0").returncode == 0
    assert (tmp_path / "trace").read_text() == "apt-get update\napt-get install\n"


def test_chromium_is_installed_with_sudo_by_who_is_not_root(tmp_path: Path) -> None:
    assert find_chromium(tmp_path, "exit 0", root=False).returncode == 0
    assert (tmp_path / "trace").read_text() == "sudo -n\napt-get update\nsudo -n\napt-get install\n"


def test_a_chromium_that_cannot_be_installed_is_one_line_after_three_tries(tmp_path: Path) -> None:
    finished = find_chromium(tmp_path, 'echo "E: no network"; exit 100')
    assert finished.returncode == 1
    assert finished.stderr == "chromium cannot be installed, tried three times: E: no network\n"
    assert (tmp_path / "trace").read_text() == "apt-get update\n" * 3


def test_a_system_without_apt_is_told_to_install_chromium_by_hand(tmp_path: Path) -> None:
    finished = find_chromium(tmp_path, None)
    assert (finished.returncode, finished.stdout) == (1, "")
    assert finished.stderr.count("\n") == 1
    assert "no apt-get" in finished.stderr


def test_make_alone_lists_every_target() -> None:
    printed = subprocess.run(["make", "--silent"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [line.split()[0] for line in printed.splitlines()]
    assert names == [
        "help",
        "demo",
        "test",
        "storm",
        "faults",
        "partners",
        "partnertest",
        "lint",
        "bench",
        "docs",
        "clean",
    ]


def test_the_documentation_has_no_broken_link() -> None:
    finished = subprocess.run([sys.executable, ROOT / ".ci" / "check_links.py"], capture_output=True, text=True)
    assert (finished.returncode, finished.stderr) == (0, "")


def test_broken_links_are_found_and_good_ones_pass(tmp_path: Path) -> None:
    check = write_script(tmp_path / ".ci" / "check_links.py", "")
    check.write_bytes((ROOT / ".ci" / "check_links.py").read_bytes())
    (tmp_path / "docs").mkdir()
    page = "# A `code` heading\n# Two\n# Two\n[up](../README.md)\n"
    (tmp_path / "docs" / "page.md").write_text(page, encoding="utf-8")
    good = "[a](docs/page.md#a-code-heading) [b](docs/page.md#two-1) [c](https://x.invalid/) `[d](gone.md)`\n"
    (tmp_path / "README.md").write_text(good + "[e](gone.md)\n[f](docs/page.md#three)\n", encoding="utf-8")
    finished = subprocess.run([sys.executable, check], capture_output=True, text=True)
    assert finished.returncode == 1
    assert [line.split(": ")[1:] for line in finished.stderr.splitlines()] == [
        ["gone.md", "no such file"],
        ["docs/page.md#three", "no such heading in page.md"],
    ]


def test_no_file_names_a_path_of_one_machine() -> None:
    folders = "work|root|tmp/env"
    machine_path = re.compile(rf"(?<![\w.$<>)/-])/(?:{folders})(?![\w-])")
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in project_files()
        for match in machine_path.finditer(path.read_bytes().decode("utf-8", "replace"))
    ]
    assert found == []


def test_tests_of_an_environment_that_is_not_there_are_named_as_not_run(tmp_path: Path) -> None:
    script = tmp_path / ".ci" / "partners.py"
    script.parent.mkdir()
    script.write_bytes((ROOT / ".ci" / "partners.py").read_bytes())
    finished = subprocess.run([sys.executable, script, "--test"], capture_output=True, text=True)
    assert finished.returncode == 0
    assert re.search(
        r"not run, there is no environment \.partners/lowest \(make partners\): tests/format", finished.stdout
    )


def test_the_lowest_versions_are_those_that_are_declared() -> None:
    printed = run_python("-c", "import partners; print(*partners.lowest_versions())", cwd=ROOT / ".ci").stdout.split()
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    assert [one.replace(">=", "==") for one in declared] == printed[: len(declared)]
