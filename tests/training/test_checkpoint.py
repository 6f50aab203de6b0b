"""Checkpoints that are damaged, half written or of something else."""

import json
import os
from pathlib import Path

import pytest
from safetensors.torch import save_file

from dspark_store.train import main
from dspark_store.training import checkpoint as checkpoint_module
from dspark_store.training.checkpoint import DRAFT, OPTIMIZER, STATE, checkpoints, read_place, save_checkpoint
from tests.precompute.jobs import precompute, states_of_files
from tests.tiny import save_target_dir, tiny_llama, write_chats
from tests.training.runs import flags, run


@pytest.fixture
def trained(store, tmp_path):
    """A training of one step, that may be gone on with."""
    return run(tmp_path / "run", "--store", store, "--max-steps", 1)


def newest(directory):
    return checkpoints(directory / "checkpoints")[-1]


def refused(directory, store, capsys):
    """Go on with a training that must be refused; return its line."""
    capsys.readouterr()
    assert main(flags(directory, "--store", store, "--max-steps", 2, "--resume")) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


def test_a_place_is_read_back_as_it_was_written(trained):
    state = json.loads((newest(trained) / "state.json").read_text())
    place = read_place(newest(trained))
    assert json.loads(json.dumps(place.to_json())) == state
    assert place.window == ()


@pytest.mark.parametrize("name", ["state.json", "draft.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("cut", [None, 0, 30])
def test_a_damaged_checkpoint_is_told_in_one_line_that_names_its_folder(trained, store, capsys, name, cut):
    path = newest(trained) / name
    if cut is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:cut])
    assert f"{newest(trained)} is damaged" in refused(trained, store, capsys)


@pytest.mark.parametrize(("field", "value"), [("window", [[1.0, 2.0]]), ("draft", {}), ("origin", None)])
def test_a_state_that_is_none_is_told_too(trained, store, capsys, field, value):
    path = newest(trained) / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    assert f"{newest(trained)} is damaged" in refused(trained, store, capsys)


def test_a_checkpoint_of_another_version_is_refused(trained, store, capsys):
    path = newest(trained) / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 1}))
    assert "has format_version 1, expected 2" in refused(trained, store, capsys)


def test_a_store_of_other_samples_does_not_go_on(trained, llama, tmp_path, capsys):
    chats = write_chats(tmp_path / "others.jsonl", 11, seed=1)
    other = precompute(llama, chats, tmp_path / "other")
    assert "the checkpoint was trained from a store of other samples" in refused(trained, other, capsys)


def test_a_store_of_another_target_does_not_go_on(trained, chats, tmp_path, capsys):
    target = save_target_dir(tmp_path / "target", tiny_llama(seed=5))
    other = precompute(target, chats, tmp_path / "other")
    assert "target_weights of the checkpoint is" in refused(trained, other, capsys)


def test_a_save_that_is_cut_off_leaves_what_was_there_and_is_swept_by_the_next(store, tmp_path):
    directory = tmp_path / "run"
    saved = []

    def cut_off(tensors, path):
        saved.append(path)
        if len(saved) == 4:
            raise KeyboardInterrupt
        save_file(tensors, path)

    more = ("--store", store, "--max-steps", 3, "--checkpoint-every", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_module, "save_file", cut_off)
        with pytest.raises(KeyboardInterrupt):
            run(directory, *more)
    folder = directory / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [".step-00000002.tmp", "step-00000001"]
    run(directory, *more, "--resume")
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(store, tmp_path, monkeypatch):
    synced, sync = [], os.fsync

    def noted(descriptor):
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    folder = run(tmp_path / "run", "--store", store, "--max-steps", 1) / "checkpoints"
    hidden = folder / ".step-00000001.tmp"
    assert {hidden, *(hidden / name for name in (DRAFT, OPTIMIZER, STATE))} <= set(synced)
    assert synced[-1] == folder


def test_a_checkpoint_that_is_there_is_never_written_again(trained):
    before = states_of_files(newest(trained))
    place = read_place(newest(trained))
    assert save_checkpoint(trained / "checkpoints", None, place, 2) == newest(trained)  # type: ignore[arg-type]
    assert states_of_files(newest(trained)) == before
