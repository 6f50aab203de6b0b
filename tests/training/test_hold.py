"""One training at a time in a directory."""

import json
import os
import re
import socket
import subprocess
import sys

import pytest

from dspark_store.format.storage import LocalStorage
from dspark_store.train import main
from dspark_store.training.loop import Training
from dspark_store.writers.lock import LOCK_KEY, StoreLock
from tests.precompute.jobs import states_of_files
from tests.processes import ENVIRONMENT, TWO_RANKS, run_python
from tests.training.runs import flags, metrics, run

HELD = (
    rf"error: (?:rank \d: )?.*run is being written by process {os.getpid()} on {re.escape(socket.gethostname())} since "
    r"20\d\d-\d\d-\d\d \d\d:\d\d UTC \(last sign of life \d+ s ago\); wait for it, or end it"
)


def errors(text):
    return [line for line in text.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize("more", [(), ("--resume",)])
def test_a_second_training_is_refused_in_one_line_that_says_who_trains(store, tmp_path, capsys, more):
    directory = run(tmp_path / "run", "--store", store, "--max-steps", 1)
    with StoreLock(LocalStorage(directory)):
        before = states_of_files(directory)
        capsys.readouterr()
        assert main(flags(directory, "--store", store, "--max-steps", 2, *more)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.fullmatch(HELD, line)
        assert states_of_files(directory) == before


def test_of_two_trainings_that_start_together_one_trains_to_its_end(store, tmp_path):
    more = ("--store", store, "--epochs", 20, "--max-steps", 30, "--checkpoint-every", 3)
    command = [sys.executable, "-m", "dspark_store.train", *flags(tmp_path / "run", *more)]
    jobs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) for _ in range(3)]
    texts = [job.communicate()[1] for job in jobs]
    assert sorted(job.returncode for job in jobs) == [0, 2, 2]
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 31))
    assert not (tmp_path / "run" / LOCK_KEY).exists()
    for job, text in zip(jobs, texts, strict=True):
        (line,) = errors(text) if job.returncode else ("is being written by process",)
        assert re.search(r"is being written by process|has checkpoints: pass --resume", line)


def test_ranks_are_refused_in_one_line_too(store, tmp_path):
    (tmp_path / "run").mkdir()
    with StoreLock(LocalStorage(tmp_path / "run")):
        done = run_python(*TWO_RANKS, "-m", "dspark_store.train", *flags(tmp_path / "run", "--store", store))
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [LOCK_KEY]
    assert done.returncode != 0
    (line,) = errors(done.stderr)
    assert re.fullmatch(HELD, line)


@pytest.mark.parametrize("how", ["removed", "taken"])
def test_a_training_that_loses_its_lock_ends_and_writes_no_more(store, tmp_path, monkeypatch, capsys, how):
    directory, left = tmp_path / "run", {}
    act = Training._now_and_then
    theirs = json.dumps({"host": "elsewhere", "space": "?", "pid": 7, "started": "1"})

    def lose(training):
        if training.learner.step == 3:
            (directory / LOCK_KEY).unlink()
            if how == "taken":
                (directory / LOCK_KEY).write_text(theirs)
            left.update(states_of_files(directory))
        act(training)

    monkeypatch.setattr(Training, "_now_and_then", lose)
    more = ("--store", store, "--epochs", 4, "--max-steps", 8, "--checkpoint-every", 2, "--tensorboard")
    assert main(flags(directory, *more)) == 3
    assert "was taken over by another job" in capsys.readouterr().err.splitlines()[-1]
    assert states_of_files(directory) == left
    assert [line["step"] for line in metrics(directory)] == [1, 2, 3]


def test_a_checkpoint_that_was_being_written_when_the_lock_was_lost_does_not_appear(store, tmp_path, monkeypatch):
    directory = tmp_path / "run"

    def lose(*given):
        (directory / LOCK_KEY).unlink(missing_ok=True)

    monkeypatch.setattr("dspark_store.training.checkpoint.sync_path", lose)
    assert main(flags(directory, "--store", store, "--max-steps", 2)) == 3
    assert list((directory / "checkpoints").iterdir()) == []


def test_a_training_that_is_refused_leaves_no_folder(store, tmp_path):
    assert main(flags(tmp_path / "new" / "run", "--store", store, "--mask-token-id", 288)) == 2
    assert list(tmp_path.iterdir()) == []
