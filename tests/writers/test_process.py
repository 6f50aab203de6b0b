"""A process is named for all time, and told from a later one with the same number."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dspark_store.writers import process as process_module
from dspark_store.writers.process import ProcessName
from tests.processes import ended_pid


@pytest.fixture
def no_proc(monkeypatch):
    """A system that has no /proc."""

    def refuse(self, *arguments, **options):
        raise FileNotFoundError(str(self))

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(Path, "readlink", refuse)


def test_this_process_is_local_and_runs():
    own = ProcessName.own()
    assert own.pid == os.getpid()
    assert own.is_local
    assert own.still_runs


def test_an_ended_process_does_not_run():
    assert not replace(ProcessName.own(), pid=ended_pid()).still_runs


def test_an_earlier_process_with_the_same_number_does_not_run():
    assert not replace(ProcessName.own(), started="1").still_runs


def test_a_zombie_does_not_run():
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    name = replace(ProcessName.own(), pid=child.pid, started=process_module._started(child.pid))
    assert name.still_runs
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not name.still_runs
    child.communicate()


def test_a_program_may_have_any_name(monkeypatch):
    stat = "7 (a ) R (b) S 1 " + " ".join(str(number) for number in range(5, 60))
    monkeypatch.setattr(Path, "read_text", lambda self, **options: stat)
    assert ProcessName.own().started == "22"


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"space": "pid:[1]"}])
def test_a_process_of_another_host_or_container_is_not_local(change):
    assert not replace(ProcessName.own(), **change).is_local


def test_without_proc_a_process_that_exists_runs(no_proc):
    own = ProcessName.own()
    assert (own.space, own.started) == ("?", "?")
    assert own.is_local
    assert own.still_runs
    assert not replace(own, pid=ended_pid()).still_runs


def test_a_process_whose_start_cannot_be_seen_is_taken_to_run(monkeypatch):
    name = ProcessName.own()
    monkeypatch.setattr(process_module, "_started", lambda pid: "?")
    assert name.still_runs


def test_a_name_travels_as_json_whatever_stands_beside_it():
    own = ProcessName.own()
    assert ProcessName.from_json(json.dumps({**json.loads(own.to_json()), "taken": 5})) == own


@pytest.mark.parametrize("text", ["", "{", "3", "[]", "null", '{"host": "x"}', '"x"', b"\xff\xfe\x01"])
def test_what_names_no_process_is_an_error(text):
    with pytest.raises(ValueError, match=r"names no process|Expecting|decode"):
        ProcessName.from_json(text)
