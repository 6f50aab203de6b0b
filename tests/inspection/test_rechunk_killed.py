"""A copy that is killed, or fails, at any of its system calls goes on to the bytes of one that nobody disturbed."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from dspark_store.inspection.rechunk import rechunk
from dspark_store.inspection.shardwise import Workers
from dspark_store.writers.lock import LOCK_KEY
from tests.inspection.copies import MANIFEST, OTHER, assert_copied, contents, phase_of
from tests.inspection.killed import COUNTED_CALLS, Counted
from tests.processes import ROOT
from tests.stores import build_store

KILLED_EVERY, RAISED_EVERY = 7, 5
"""Of all counted calls, about 200, every so manieth is a last one; the others are as good, and take as long."""


class Copier:
    """The process of `tests.inspection.killed`."""

    def __init__(self, stdin: IO[str], stdout: IO[str]) -> None:
        self._stdin, self._stdout = stdin, stdout

    def copy(self, source: Path, destination: Path, nth: int) -> tuple[int, int]:
        """Copy in a process that dies at the n-th call; return its wait status, and its calls where it lived."""
        print(json.dumps([str(source), str(destination), nth]), file=self._stdin, flush=True)
        status, calls = json.loads(self._stdout.readline())
        return status, calls


@pytest.fixture(scope="module")
def copier() -> Iterator[Copier]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.inspection.killed"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the process has no pipes")
        yield Copier(process.stdin, process.stdout)
        process.stdin.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return build_store(tmp_path_factory.mktemp("copied") / "source", fields={"manifest": MANIFEST}).path


@pytest.fixture(scope="module")
def whole(source, copier):
    """A copy that nobody disturbed, and how many calls it took."""
    status, calls = copier.copy(source, source.parent / "whole", 0)
    assert status == 0
    return contents(source.parent / "whole"), calls


def assert_goes_on(source: Path, place: Path, whole: dict[str, bytes]) -> None:
    kept = {name: path.stat().st_mtime_ns for name, path in committed(place).items()}
    rechunk(source, place, OTHER, workers=Workers(threads=2))
    assert contents(place) == whole
    assert kept == {name: path.stat().st_mtime_ns for name, path in committed(place).items() if name in kept}


def committed(place: Path) -> dict[str, Path]:
    return {path.name: path for path in (place / "ledger" / "states").glob("c.*")}


def test_a_copy_that_is_killed_at_any_call_goes_on(source, whole, copier, tmp_path, record_property):
    kills = 0
    for nth in range(1, whole[1], KILLED_EVERY):
        place = tmp_path / str(nth)
        status, _ = copier.copy(source, place, nth)
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert nth < 3 or (place / LOCK_KEY).exists() or phase_of(place) == "complete"
        assert_goes_on(source, place, whole[0])
        kills += 1
    assert kills > 20
    assert_copied(source, tmp_path / "1")
    record_property("kills of a copy", kills)


def test_a_copy_that_fails_at_any_call_goes_on(source, whole, tmp_path, record_property):
    failures = 0
    for nth in range(1, whole[1], RAISED_EVERY):
        place = tmp_path / str(nth)
        failures += fails(source, place, nth)
        # a process that failed would be gone, and its lock nobody's
        (place / LOCK_KEY).unlink(missing_ok=True)
        assert_goes_on(source, place, whole[0])
    assert failures > 20
    record_property("failures of a copy", failures)


def fails(source: Path, place: Path, nth: int) -> bool:
    """Copy, with an error in place of the n-th call; tell whether the copy failed. One to clean up is none to it."""

    def fail() -> None:
        raise OSError(errno.EIO, "Input/output error, says the test")

    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(nth, fail)
        for name in COUNTED_CALLS:
            patch.setattr(os, name, counted.wrap(name))
        try:
            rechunk(source, place, OTHER, workers=Workers(threads=1))
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return True
    return False
