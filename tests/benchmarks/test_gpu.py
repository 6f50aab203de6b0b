"""The GPU benchmark runs to its end at a tiny size, and a part that fails or does not end fails it."""

import faulthandler
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import Figure, run_parts
from tests.processes import run_python

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.sh"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The finished script, run once at the tiny size, and its JSON."""
    out, place = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("place")
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(out), "CUDA_VISIBLE_DEVICES": ""}
    command = [str(SCRIPT), "--tiny", "--place", str(place)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert not list(place.iterdir())
    return done, json.loads((out / "gpu.json").read_text())


def test_the_tiny_run_ends_with_every_check_passed(tiny):
    done, table = tiny
    assert done.returncode == 0, done.stderr
    checks = {row["name"]: row["passed"] for row in table["rows"] if row["passed"] is not None}
    assert len(checks) == 4
    assert all(checks.values())


def test_the_tiny_run_prints_every_figure_that_its_json_has(tiny):
    done, table = tiny
    names = [row["name"] for row in table["rows"]]
    assert [line[:46].rstrip() for line in done.stdout.splitlines()] == names
    assert {"forward alone", "forward with copies and writing", "loader / plain", "a step with the loader"} <= set(
        names
    )
    assert all(row["value"] > 0 for row in table["rows"] if row["unit"])


def test_the_script_refuses_a_python_that_lacks_what_it_needs():
    done = subprocess.run([str(SCRIPT)], env={**os.environ, "PYTHON": "/bin/false"}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "PYTHON=/bin/false" in done.stderr


def test_a_failed_check_fails_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: None)  # one timer, which is pytest's
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: None)
    parts = [("target", 60.0, lambda: iter([Figure("differences", 1.0, passed=False), Figure("rate", 2.0, "x")]))]
    assert not run_parts(parts, tmp_path)
    assert "FAILED" in capsys.readouterr().out
    assert json.loads((tmp_path / "gpu.json").read_text())["passed"] is False


def test_a_part_over_its_limit_ends_the_process_and_what_it_measured_is_kept(tmp_path):
    program = f"""
import threading, pathlib
from benchmarks.gpu import Figure, run_parts

def endless():
    yield Figure("rate", 2.0, "x")
    threading.Event().wait()

run_parts([("target", 0.1, endless)], pathlib.Path({str(tmp_path)!r}))
"""
    done = run_python("-c", program)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "endless" in done.stderr
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert ([row["name"] for row in kept["rows"]], kept["passed"]) == (["rate"], False)
