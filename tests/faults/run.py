"""Breaks the library one line at a time, in copies of the tree, and looks whether a test fails: `make faults`.

The faults stand in faults.toml. A fault has a name (what is broken), ``find`` (a run of text that stands once in the
library, in whichever module), ``replace``, and ``tests``: names of tests of which at least one then fails, each maybe
narrowed as for pytest's -k (``test_name and bf16``), or ``file::test_name`` where several files have the name.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("faults.toml")
KILLED, SURVIVED, GONE, HUNG, UNRUN = "killed", "SURVIVED", "no place left", "TIMED OUT", "TESTS DO NOT RUN"
_LIBRARY = ("dspark_store", "readers", "writers")
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "demo", "bench", "site", "build", "dist", "*.egg-info")


@dataclass(frozen=True, slots=True)
class Fault:
    """A line that is broken so that one of ``tests`` must fail; with ``hangs`` they may also go on for ever."""

    name: str
    find: str
    replace: str
    tests: Sequence[str]
    hangs: bool = False


def read_faults(path: Path) -> list[Fault]:
    """Read a list of faults; ValueError where two have one name, or one changes nothing."""
    faults = [Fault(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]]
    twice = [name for name, count in Counter(fault.name for fault in faults).items() if count > 1]
    same = [fault.name for fault in faults if fault.find == fault.replace]
    if twice or same:
        raise ValueError(f"{path}: faults of one name: {twice}; faults that change nothing: {same}")
    return faults


@cache
def _texts(root: Path, folders: tuple[str, ...], pattern: str) -> dict[Path, str]:
    paths = sorted({path.resolve() for folder in folders for path in (root / folder).rglob(pattern)})
    return {path.relative_to(root.resolve()): path.read_text(encoding="utf-8") for path in paths}


def place_of(fault: Fault, root: Path) -> Path | None:
    """Return the module that holds the fault's line, None when none does; ValueError when it stands more than once."""
    found = {path: text.count(fault.find) for path, text in _texts(root, _LIBRARY, "*.py").items()}
    places = [path for path, count in found.items() if count]
    if sum(found.values()) > 1:
        raise ValueError(f"{fault.name}: {fault.find!r} stands in {', '.join(map(str, places))}: find more of it")
    return places[0] if places else None


def selection(tests: Iterable[str], root: Path) -> list[str]:
    """Return pytest's arguments for tests by name; ValueError for a name that is not in exactly one file."""
    texts = _texts(root, ("tests",), "test_*.py")
    files: list[str] = []
    names: list[str] = []
    for test in tests:
        path, _, name = test.rpartition("::")
        line = f"def {name.split()[0]}("
        homes = [path] if path else [str(file) for file in texts if line in texts[file]]
        if len(homes) != 1:
            raise ValueError(f"{name} is in {', '.join(homes) or 'no file'}: name one test, as file::test_name")
        files += homes
        names.append(f"({name})")
    return [*dict.fromkeys(files), "-k", " or ".join(dict.fromkeys(names))]


def copy_tree(root: Path, folder: str) -> Path:
    """Copy what tests need of a tree into a folder; return the copy."""
    return Path(shutil.copytree(root, Path(folder, "tree").resolve(), symlinks=True, ignore=_LEFT_OUT))


def run_tests(root: Path, tests: Iterable[str], seconds: float | None = None) -> tuple[str, str]:
    """Run tests on a tree; return what became of them, and the test that failed or the end of what pytest said."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *selection(tests, root)]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=root, env=environment, start_new_session=True, **pipes)  # type: ignore[call-overload]
    try:
        said = process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        return HUNG, f"after {seconds:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    failed = re.search(r"^FAILED \S*?::(\S+)", said, re.MULTILINE)
    if process.returncode == 1 and failed:
        return (HUNG if "from pytest-timeout" in said else KILLED), failed[1]
    return (UNRUN if process.returncode else SURVIVED), said[-2000:] if process.returncode else ""


def try_fault(fault: Fault, root: Path, seconds: float) -> tuple[str, str]:
    """Run a fault's tests on a copy of the tree in which its line is broken."""
    path = place_of(fault, root)
    if path is None:
        return GONE, ""
    with TemporaryDirectory(prefix="faults-") as folder:
        copy = copy_tree(root, folder)
        text = (copy / path).read_text(encoding="utf-8")
        (copy / path).write_text(text.replace(fault.find, fault.replace), encoding="utf-8")
        verdict, detail = run_tests(copy, fault.tests, seconds)
    return (KILLED if verdict == HUNG and fault.hangs else verdict), detail


def try_all(faults: Sequence[Fault], root: Path, *, jobs: int, seconds: float) -> Counter[str]:
    """Try faults, ``jobs`` of them side by side, and say what became of each."""
    counts: Counter[str] = Counter()
    began = time.monotonic()
    pool = ThreadPoolExecutor(jobs)
    try:
        tries = {pool.submit(try_fault, fault, root, seconds): fault for fault in faults}
        for done, future in enumerate(as_completed(tries), 1):
            verdict, detail = future.result()
            counts[verdict] += 1
            left = (time.monotonic() - began) / done * (len(faults) - done) / 60
            said = f"\n    {detail}" if detail else ""
            print(f"[{done}/{len(faults)}, {left:.0f} min left] {verdict}: {tries[future].name}{said}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    return counts


def main(arguments: Sequence[str] | None = None, root: Path = ROOT, listed: Path = LIST) -> int:
    """Return 0 when a test fails for every fault that has a place, 1 when not, 2 when the unbroken tree fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.run", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="faults whose name holds this text")
    parser.add_argument("--jobs", type=int, default=1, help="faults tried side by side (default: 1)")
    parser.add_argument("--seconds", type=float, default=600, help="for the tests of one fault (default: 600)")
    given = parser.parse_args(arguments)
    faults = [fault for fault in read_faults(listed) if given.only in fault.name]
    tests = [test for fault in faults if place_of(fault, root) is not None for test in fault.tests]
    if tests:
        print(f"{len(faults)} faults; first, their tests on the unbroken tree", flush=True)
        with TemporaryDirectory(prefix="faults-") as folder:
            verdict, detail = run_tests(copy_tree(root, folder), tests)
        if verdict != SURVIVED:
            print(f"they do not pass on it: {detail}")
            return 2
    counts = try_all(faults, root, jobs=given.jobs, seconds=given.seconds)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "there is no such fault")
    return 0 if counts and counts.keys() <= {KILLED, GONE} else 1


if __name__ == "__main__":
    raise SystemExit(main())
