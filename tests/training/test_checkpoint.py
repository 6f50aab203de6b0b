"""Checkpoints that are damaged, half written or of something else."""

import errno
import json
import os
import subprocess
from itertools import cycle
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dspark_store.format.files import sync_path
from dspark_store.train import main
from dspark_store.training import checkpoint as checkpoint_module
from dspark_store.training.checkpoint import (
    FILES,
    STATE,
    SUMS,
    DamagedCheckpointError,
    check_checkpoint,
    checkpoints,
    read_state,
    save_checkpoint,
)
from tests.precompute.jobs import precompute, states_of_files
from tests.tiny import save_target_dir, tiny_llama, write_chats
from tests.training.runs import flags, metrics, run

FOUR = ("--max-steps", 4, "--checkpoint-every", 1, "--keep-checkpoints", 4)


@pytest.fixture
def trained(store, tmp_path):
    """A training of one step, that may be gone on with."""
    return run(tmp_path / "run", "--store", store, "--max-steps", 1)


@pytest.fixture
def four(store, tmp_path):
    """A training of four steps with a checkpoint of each."""
    return run(tmp_path / "four", "--store", store, *FOUR)


def newest(directory):
    return checkpoints(directory / "checkpoints")[-1]


def names_in(directory):
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def refused(directory, store, capsys, *more, code=1):
    """Go on with a training that must be refused; return its line."""
    capsys.readouterr()
    assert main(flags(directory, "--store", store, "--max-steps", 2, "--resume", *more)) == code
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


def edit(checkpoint, **changes):
    """Change fields of a checkpoint's state."""
    path = checkpoint / STATE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def make_old(checkpoint):
    """Make a checkpoint what it was before it had digests."""
    (checkpoint / SUMS).unlink()
    edit(checkpoint, format_version=2)


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_a_place_is_read_back_as_it_was_written(trained):
    state = json.loads((newest(trained) / "state.json").read_text())
    place = read_state(newest(trained))
    assert json.loads(json.dumps(place.to_json())) == state
    assert place.window == ()


@pytest.mark.parametrize(
    ("name", "cut"),
    [*zip(FILES, [None, 0, 30], strict=True), *zip(FILES, [30, None, 0], strict=True), (SUMS, 0), (SUMS, 30)],
)
def test_a_damaged_checkpoint_is_told_in_one_line_that_names_its_folder_and_file(trained, store, capsys, name, cut):
    path = newest(trained) / name
    if cut is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:cut])
    line = refused(trained, store, capsys)
    assert f"{newest(trained)} is damaged" in line
    assert name in line
    assert line.endswith("no other one there is whole: choose another --output-dir")


@pytest.mark.parametrize("name", [*FILES, SUMS])
def test_a_flipped_bit_is_found_wherever_it_is(trained, name):
    path = newest(trained) / name
    before, bits = path.read_bytes(), 8 * path.stat().st_size
    for bit in sorted({*range(0, bits, max(1, bits // 40)), bits - 1}):
        flip(path, bit)
        with pytest.raises(DamagedCheckpointError, match="is damaged: "):
            check_checkpoint(newest(trained))
        path.write_bytes(before)
    check_checkpoint(newest(trained))


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_ends_a_training_that_is_to_go_on(trained, store, capsys, name):
    flip(newest(trained) / name, 8 * (newest(trained) / name).stat().st_size - 12)
    before = states_of_files(trained)
    assert f"is damaged: {name} is not what was written" in refused(trained, store, capsys)
    assert states_of_files(trained) == before


def test_the_digests_are_those_that_sha256sum_checks(trained):
    done = subprocess.run(["sha256sum", "--strict", "--check", SUMS], cwd=newest(trained), capture_output=True)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [f"{name}: OK".encode() for name in FILES]


@pytest.mark.parametrize("old", [False, True])
def test_an_emptied_optimizer_is_found_with_and_without_digests(trained, store, capsys, old):
    if old:
        make_old(newest(trained))
    save_file({}, newest(trained) / "optimizer.safetensors")
    assert "optimizer.safetensors" in refused(trained, store, capsys)


@pytest.mark.parametrize("old", [False, True])
def test_a_folder_that_is_named_for_another_step_is_found(trained, store, capsys, old):
    if old:
        make_old(newest(trained))
    newest(trained).rename(newest(trained).with_name("step-00000002"))
    assert "state.json is of step 1, its folder is named step-00000002" in refused(trained, store, capsys)


def test_an_optimizer_of_another_step_is_found(four, store, capsys):
    for checkpoint in checkpoints(four / "checkpoints"):
        make_old(checkpoint)
    first, *_, last = checkpoints(four / "checkpoints")
    (first / "optimizer.safetensors").replace(last / "optimizer.safetensors")
    assert "optimizer.safetensors has made 1 steps, state.json says 4" in refused(four, store, capsys)


@pytest.mark.parametrize("part", ["exp_avg", "exp_avg_sq"])
def test_an_optimizer_of_another_shape_is_found(trained, store, capsys, part):
    make_old(newest(trained))
    path = newest(trained) / "optimizer.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith(f"/{part}"))
    save_file({**tensors, name: tensors[name].flatten()[:1]}, path)
    assert "optimizer.safetensors has another shape of" in refused(trained, store, capsys)


@pytest.mark.parametrize(
    ("field", "value"),
    [("window", [[1.0, 2.0]]), ("draft", {}), ("origin", None), ("step", "1"), ("step", True), ("loader", [])],
)
def test_a_state_that_is_none_is_told_too(trained, store, capsys, field, value):
    make_old(newest(trained))
    edit(newest(trained), **{field: value})
    assert f"{newest(trained)} is damaged" in refused(trained, store, capsys)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format_version": 3, "step": NaN}', '"x"', "3", "\ud800", ""])
def test_a_state_that_is_no_object_of_ours_is_told_in_one_line(trained, store, capsys, text):
    (newest(trained) / SUMS).unlink()
    (newest(trained) / STATE).write_bytes(text.encode("utf-8", "surrogatepass"))
    assert f"{newest(trained)} is damaged" in refused(trained, store, capsys)


@pytest.mark.parametrize("name", [*FILES, SUMS])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(trained, store, capsys, name):
    (newest(trained) / name).unlink()
    os.mkfifo(newest(trained) / name)
    assert f"is damaged: {name} is missing" in refused(trained, store, capsys)


def test_a_checkpoint_of_another_version_is_refused(trained, store, capsys):
    make_old(newest(trained))
    edit(newest(trained), format_version=1)
    assert "has format_version 1, expected 3" in refused(trained, store, capsys, code=2)


def test_a_checkpoint_without_digests_is_gone_on_from_with_one_warning(store, tmp_path, caplog):
    whole = run(tmp_path / "whole", "--store", store, "--epochs", 2, "--max-steps", 8, "--checkpoint-every", 4)
    old = run(tmp_path / "old", "--store", store, "--epochs", 2, "--max-steps", 8, "--checkpoint-every", 4)
    for file in newest(old).iterdir():
        file.unlink()
    newest(old).rmdir()
    make_old(newest(old))
    run(old, "--store", store, "--epochs", 2, "--max-steps", 8, "--checkpoint-every", 4, "--resume")
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    first = checkpoints(old / "checkpoints")[0]
    assert warnings == [f"{first} was written without digests: whether it is what was written cannot be checked"]
    assert (old / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert (newest(old) / SUMS).read_bytes() == (newest(whole) / SUMS).read_bytes()


def test_the_newest_checkpoint_that_is_whole_is_named(four, store, capsys):
    one, two, three, last = checkpoints(four / "checkpoints")
    for checkpoint, whole in ((last, three), (three, two), (two, one)):
        flip(checkpoint / "draft.safetensors", 4321)
        line = refused(four, store, capsys)
        assert line == (
            f"error: checkpoint {last} is damaged: draft.safetensors is not what was written; the newest whole one is "
            f"{whole.name}, from which a training goes on with --resume-from {whole.name}"
        )


def test_a_training_goes_on_from_a_named_checkpoint_and_removes_nothing(four, store):
    before = {path.relative_to(four): path.read_bytes() for path in four.rglob("*") if path.is_file()}
    flip(newest(four) / "optimizer.safetensors", 4321)
    before |= {path.relative_to(four): path.read_bytes() for path in newest(four).iterdir()}
    run(four, "--store", store, *FOUR, "--keep-checkpoints", 1, "--resume-from", "step-00000002")
    steps = [f"step-{step:08d}" for step in range(1, 5)]
    # of its own it keeps the newest, of what it found it keeps all: later ones under other names
    assert names_in(four) == sorted([steps[0], steps[1], steps[3], f"{steps[2]}.aside-1", f"{steps[3]}.aside-1"])
    after = {path.relative_to(four): path.read_bytes() for path in four.rglob("*") if path.is_file()}
    for path, content in before.items():
        moved = path.parts[0] == "metrics.jsonl" or path.parts[1] in steps[2:]
        place = [
            f"{part}.aside-1" if moved and (part in steps or part == "metrics.jsonl") else part for part in path.parts
        ]
        assert after[path.__class__(*place)] == content
    assert after[(four / "metrics.jsonl").relative_to(four)] == before[(four / "metrics.jsonl").relative_to(four)]
    check_checkpoint(newest(four))


def test_a_named_checkpoint_may_be_gone_back_to_again_and_again(four, store):
    for number in (1, 2, 3):
        run(four, "--store", store, *FOUR, "--resume-from", "step-00000003")
        assert f"step-00000004.aside-{number}" in names_in(four)
        assert (four / f"metrics.jsonl.aside-{number}").exists()
        assert [line["step"] for line in metrics(four)] == [1, 2, 3, 4]


def test_going_on_from_the_newest_by_name_sets_nothing_aside(four, store):
    before = states_of_files(four / "checkpoints")
    run(four, "--store", store, *FOUR, "--resume-from", "step-00000004")
    assert states_of_files(four / "checkpoints") == before
    assert not list(four.glob("*.aside-*"))


@pytest.mark.parametrize("name", ["step-00000009", "../checkpoints/step-00000001", "", "newest", ".step-00000001.tmp"])
def test_a_checkpoint_that_is_not_there_cannot_be_named(trained, store, capsys, name):
    line = refused(trained, store, capsys, "--resume-from", name, code=2)
    assert line == f"error: {trained} has no checkpoint {name!r} to go on from; there are: step-00000001"


def test_a_damaged_checkpoint_that_is_named_is_refused(four, store, capsys):
    flip(checkpoints(four / "checkpoints")[1] / "draft.safetensors", 4321)
    before = states_of_files(four)
    assert "the newest whole one is step-00000004" in refused(four, store, capsys, "--resume-from", "step-00000002")
    assert states_of_files(four) == before


def test_a_store_of_other_samples_does_not_go_on(trained, llama, tmp_path, capsys):
    chats = write_chats(tmp_path / "others.jsonl", 11, seed=1)
    other = precompute(llama, chats, tmp_path / "other")
    assert "the checkpoint was trained from a store of other samples" in refused(trained, other, capsys, code=2)


def test_a_store_of_another_target_does_not_go_on(trained, chats, tmp_path, capsys):
    target = save_target_dir(tmp_path / "target", tiny_llama(seed=5))
    other = precompute(target, chats, tmp_path / "other")
    assert "target_weights of the checkpoint is" in refused(trained, other, capsys, code=2)


def test_what_a_killed_save_leaves_is_swept_by_the_next(store, tmp_path):
    directory = run(tmp_path / "run", "--store", store, "--max-steps", 1)
    left = directory / "checkpoints" / ".step-00000002.tmp"
    left.mkdir()
    (left / "draft.safetensors").write_bytes(b"half")
    run(directory, "--store", store, "--max-steps", 2, "--resume")
    assert names_in(directory) == ["step-00000001", "step-00000002"]


class Full:
    """A disk that is full from one call of a function on."""

    def __init__(self, monkeypatch, function, calls, error):
        self.left, self.function, self.error = calls, function, error
        monkeypatch.setattr(checkpoint_module, function.__name__, self)

    def __call__(self, *given):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return self.function(*given)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
FAILURES = (FULL, OSError(errno.EIO, os.strerror(errno.EIO)), KeyboardInterrupt())


@pytest.mark.parametrize(("calls", "error"), [*zip(range(7, 14), cycle(FAILURES), strict=False)])
def test_a_save_that_fails_at_any_step_leaves_what_was_there_and_nothing_else(
    store, tmp_path, monkeypatch, capsys, error, calls
):
    """A save makes seven things durable: the folder above, four files, their folder, and its name, when it is there."""
    directory = tmp_path / "run"
    with monkeypatch.context() as patch:
        Full(patch, sync_path, calls, error)
        code = main(flags(directory, "--store", store, *FOUR))
    assert code == (130 if isinstance(error, KeyboardInterrupt) else 2)
    if error is FULL:
        told = capsys.readouterr().err.splitlines()[-1]
        assert told == (
            f"error: no space is left for {directory}; checkpoints that are there stay: free some, go on with --resume"
        )
    assert names_in(directory) == [f"step-{step:08d}" for step in range(1, 3 if calls == 13 else 2)]
    assert not list(directory.rglob("*.tmp"))
    run(directory, "--store", store, *FOUR, "--resume")
    assert [line["step"] for line in metrics(directory)] == [1, 2, 3, 4]


@pytest.mark.parametrize("size", ["8k", "64k", "400k", "900k"])
def test_a_small_disk_fills_up_and_a_larger_one_goes_on(store, mounted, capsys, size):
    place = mounted(f"size={size}")
    directory = place / "run"
    assert main(flags(directory, "--store", store, *FOUR)) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: no space is left for {directory}; ")
    assert not list(place.rglob("*.tmp"))
    for checkpoint in checkpoints(directory / "checkpoints"):
        check_checkpoint(checkpoint)
    mounted("size=64m")
    run(directory, "--store", store, *FOUR, "--resume")
    assert [line["step"] for line in metrics(directory)] == [1, 2, 3, 4]


def test_a_checkpoint_and_the_folders_above_it_are_on_the_disk_before_it_has_its_name(store, tmp_path, monkeypatch):
    synced = []

    def fsync(descriptor):
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

    monkeypatch.setattr(os, "fsync", fsync)
    directory = run(tmp_path / "new" / "run", "--store", store, "--max-steps", 1)
    above = [tmp_path, tmp_path / "new", directory, directory / "checkpoints"]
    assert [str(path) for path in above if str(path) not in synced] == []
    hidden = f"{directory}/checkpoints/.step-00000001.tmp"
    assert {hidden, *(f"{hidden}/{name}" for name in (*FILES, SUMS))} <= set(synced)
    assert synced[-1] == str(directory / "checkpoints")


def test_a_checkpoint_that_is_there_is_never_written_again(trained):
    before = states_of_files(newest(trained))
    place = read_state(newest(trained))
    assert save_checkpoint(trained / "checkpoints", None, place, 2) == newest(trained)  # type: ignore[arg-type]
    assert states_of_files(newest(trained)) == before
