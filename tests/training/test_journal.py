import json
import re

import pytest

from dspark_store.training.journal import Journal, read_metrics
from dspark_store.writers.lock import LostLockError


def written(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_lines_are_appended_with_kind_and_step(tmp_path):
    journal = Journal(tmp_path, 0)
    journal.write("train", 1, {"loss": 0.5})
    journal.write("validation", 1, {"tau": 2.0})
    journal.close()
    assert written(tmp_path) == [
        {"kind": "train", "step": 1, "loss": 0.5},
        {"kind": "validation", "step": 1, "tau": 2.0},
    ]


def test_lines_past_the_step_that_is_gone_on_from_are_dropped_with_one_that_was_cut_off(tmp_path):
    journal = Journal(tmp_path, 0)
    for step in range(1, 5):
        journal.write("train", step, {"loss": step})
    journal.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    for step, left in ((2, [1, 2]), (0, [])):
        Journal(tmp_path, step).close()
        assert [line["step"] for line in written(tmp_path)] == left


@pytest.mark.parametrize(
    "line",
    [
        b"no json",
        b'{"kind": "train"}',
        b'{"kind": "train", "step": "1", "loss": 1}',
        b'{"kind": "train", "step": 2, "loss": [1]}',
        b'{"kind": "other", "step": 2}',
        b"[1]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"kind": "train", \r "step": }',
    ],
)
def test_a_line_that_no_training_wrote_is_told_with_its_file_and_number(tmp_path, line):
    journal = Journal(tmp_path, 0)
    journal.write("train", 1, {"loss": 0.5})
    journal.close()
    path = tmp_path / "metrics.jsonl"
    before = path.read_bytes() + line + b"\n"
    path.write_bytes(before)
    for read in (lambda: Journal(tmp_path, 1), lambda: read_metrics(tmp_path)):
        with pytest.raises(ValueError, match=re.escape(f"{path}:2 is no line of metrics of a training")):
            read()
    assert path.read_bytes() == before


def test_nothing_is_written_once_the_check_raises(tmp_path):
    lost: list[bool] = []

    def check():
        if lost:
            raise LostLockError("lost")

    journal = Journal(tmp_path, 0, check=check)
    journal.write("train", 1, {"loss": 0.5})
    lost.append(True)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for write in (lambda: journal.write("train", 2, {"loss": 0.5}), lambda: Journal(tmp_path, 0, check=check)):
        with pytest.raises(LostLockError):
            write()
    journal.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_training_that_begins_again_leaves_nothing_of_the_one_before_on_the_board(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for loss in (1.0, 2.0):
        journal = Journal(tmp_path, 0, tensorboard=True)
        journal.write("validation", 0, {"loss": loss})
        journal.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("validation/loss")] == [(0, 2.0)]


def test_tensorboard_is_asked_for_by_the_name_of_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(ImportError, match=r"dspark-store\[train\]"):
        Journal(tmp_path, 0, tensorboard=True)


def test_tensorboard_is_given_the_same_figures_by_a_flush(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    journal = Journal(tmp_path, 0, tensorboard=True)
    journal.write("train", 3, {"loss": 0.5, "tau": 2.0})
    journal.write("train", 6, {"loss": 0.25})
    journal.flush()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    journal.close()
    assert sorted(events.Tags()["scalars"]) == ["train/loss", "train/tau"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(3, 0.5), (6, 0.25)]
