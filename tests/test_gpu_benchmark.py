"""The GPU benchmark runs to its end at a tiny size, and prints what it has whatever happens."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import Message, Row, Table, main, measure

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu.sh"
FIRST, FAILING = Row("forward", 2.5, "tokens/s"), Row("differences", 1.0, "", passed=False)


def told(*messages: Message, then: str = "") -> list[str]:
    """A measuring process that tells these messages, and then does what the line of Python says."""
    lines = "".join(f"print({message.to_json()!r}, flush=True)\n" for message in messages)
    return [sys.executable, "-c", f"import sys, time\n{lines}{then}"]


def filled(command: list[str], capture_seconds: float = 60.0) -> Table:
    table = Table()
    measure(command, table, {"target": 60.0, "capture": capture_seconds}, total=60.0)
    return table


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
    assert all(any(line.startswith(name) for line in done.stdout.splitlines()) for name in names)
    assert {"forward alone", "forward with copies and writing", "loader / plain", "a step with the loader"} <= set(
        names
    )
    assert all(row["value"] > 0 for row in table["rows"] if row["unit"])


def test_the_script_refuses_a_python_that_lacks_what_it_needs():
    done = subprocess.run([str(SCRIPT)], env={**os.environ, "PYTHON": "/bin/false"}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "PYTHON=/bin/false" in done.stderr


def test_a_row_told_again_replaces_the_one_before():
    table = filled(told(Message("target", Row("forward", 1.0, "tokens/s")), Message("target", FIRST)))
    assert list(table.rows.values()) == [FIRST]
    assert table.passed


def test_a_part_over_its_limit_is_ended_and_what_it_told_is_kept():
    table = filled(told(Message("target", FIRST), Message("capture"), then="time.sleep(600)"), capture_seconds=0.2)
    assert list(table.lines()) == [
        FIRST.text(),
        "FAILED: part 'capture' was ended: it took longer than its limit",
    ]
    assert not table.passed


def test_a_process_that_fails_fails_the_table_under_the_part_it_was_in():
    table = filled(told(Message("capture"), Message("capture", FIRST), then="sys.exit(3)"))
    assert table.problems == ["part 'capture' ended with exit code 3"]
    assert table.rows == {FIRST.name: FIRST}


def test_a_failed_check_fails_the_table():
    table = filled(told(Message("target", FAILING)))
    assert not table.passed
    assert next(table.lines()).endswith("FAILED")
    assert json.loads(table.to_json())["passed"] is False


def test_lines_that_are_no_messages_go_to_stderr(capfd):
    table = filled(told(Message("target", FIRST), then="print('a word from a library')"))
    assert table.passed
    assert "a word from a library" in capfd.readouterr().err


def test_main_prints_the_table_and_fails_with_it(monkeypatch, capsys, tmp_path):
    def failing(command, table, limits, total):
        table.rows[FAILING.name] = FAILING

    monkeypatch.setattr("benchmarks.gpu.measure", failing)
    monkeypatch.setenv("OUT", str(tmp_path))
    assert main([]) == 1
    assert "FAILED" in capsys.readouterr().out
    assert json.loads((tmp_path / "gpu.json").read_text())["rows"][0]["name"] == FAILING.name
