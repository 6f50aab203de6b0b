"""Steps, epochs, checkpoints and going on."""

import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from dspark_store.train import main
from dspark_store.training.checkpoint import checkpoints, save_checkpoint
from dspark_store.training.learner import Learner
from dspark_store.writers.lock import LOCK_KEY
from tests.precompute.jobs import states_of_files
from tests.processes import ENVIRONMENT, TWO_RANKS, run_python
from tests.training.runs import flags, metrics, run, traced

EPOCHS = ("--epochs", 4)
WINDOWS = (
    *("--epochs", 20, "--max-steps", 30, "--log-every", 10, "--checkpoint-every", 4),
    *("--validate-every", 8, "--validation-fraction", 0.2),
)


def drafts(directory):
    return load_file(checkpoints(directory / "checkpoints")[-1] / "draft.safetensors")


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_training_lowers_the_loss(store, tmp_path):
    more = ("--epochs", 25, "--learning-rate", 1e-2, "--batch-size", 11, "--log-every", 5)
    directory = run(tmp_path / "run", "--store", store, *more)
    lines = metrics(directory)
    assert [line["step"] for line in lines] == [5, 10, 15, 20, 25]
    assert lines[-1]["loss"] < lines[0]["loss"] - 1


def test_accumulated_micro_batches_are_one_step_and_the_last_window_may_be_short(store, tmp_path):
    """Eleven samples are six micro-batches of two: a window of four and one of two, each epoch."""
    directory, steps = traced(tmp_path / "run", "--store", store, "--accumulate", 4, "--epochs", 2)
    assert len(steps) == 4
    assert [line["epoch"] for line in metrics(directory)] == [0, 0, 1, 1]


def test_a_window_of_fewer_micro_batches_counts_them_as_if_they_were_all(store, tmp_path):
    """One micro-batch of all samples: whatever number would be accumulated, there is only that one.

    AdamW makes the same first step of any multiple of a gradient: its norm is what tells.
    """
    one = traced(tmp_path / "one", "--store", store, "--batch-size", 11)
    four = traced(tmp_path / "four", "--store", store, "--batch-size", 11, "--accumulate", 4)
    norms = [metrics(directory)[0]["gradient_norm"] for directory, _ in (one, four)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)
    first, second = (drafts(directory) for directory, _ in (one, four))
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)


def test_the_gradient_of_a_step_is_the_mean_of_its_micro_batches(store, tmp_path):
    """At a rate of 0 every micro-batch is judged by the same draft: six of them, in a step each and in windows."""
    still = ("--store", store, "--learning-rate", 0, "--warmup-ratio", 0)
    gradients = []
    update = Learner.update

    def noted(self, pending):
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in self.draft.parameters()]))
        return update(self, pending)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "update", noted)
        run(tmp_path / "each", *still)
    norms = [line["gradient_norm"] for line in metrics(run(tmp_path / "windows", *still, "--accumulate", 4))]
    expected = [float(torch.stack(part).mean(0).norm()) for part in (gradients[:4], gradients[4:])]
    assert norms == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def uninterrupted(store, tmp_path_factory):
    return traced(tmp_path_factory.mktemp("whole"), "--store", store, "--max-steps", 14, *EPOCHS)


@pytest.fixture(scope="module")
def windowed(store, tmp_path_factory):
    return run(tmp_path_factory.mktemp("windowed"), "--store", store, *WINDOWS)


@pytest.mark.parametrize("stop", [3, 6, 8, 12])
def test_a_training_that_goes_on_gives_the_trace_of_one_that_was_not_stopped(uninterrupted, store, tmp_path, stop):
    whole, steps = uninterrupted
    directory = tmp_path / "stopped"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dspark_store.training.loop.Training._now_and_then", stop_at(stop))
        with pytest.raises(KeyboardInterrupt):
            run(directory, "--store", store, "--max-steps", 14, *EPOCHS)
    _, rest = traced(directory, "--store", store, "--max-steps", 14, *EPOCHS, "--resume")
    assert rest == steps[stop:]
    assert metrics(directory) == metrics(whole)
    assert same(drafts(directory), drafts(whole))


def stop_at(step):
    def now(training):
        if training.learner.step == step:
            training._checkpoint()
            raise KeyboardInterrupt

    return now


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_metrics_of_steps_on_both_sides_of_a_checkpoint_are_those_of_one_run(windowed, store, tmp_path, stop):
    """Lines are of ten steps, checkpoints of every fourth: the open window goes on, and no validation is lost."""
    whole = windowed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dspark_store.training.loop.save_checkpoint", interrupted_after(stop))
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "stopped", "--store", store, *WINDOWS)
    directory = run(tmp_path / "stopped", "--store", store, *WINDOWS, "--resume")
    assert [line["step"] for line in metrics(whole)] == [10, 20, 30]
    assert [line["step"] for line in metrics(whole, "validation")] == [0, 8, 16, 24, 30]
    assert metrics_so_far(directory) == metrics_so_far(whole)


def interrupted_after(saves):
    done = []

    def save(*given, **options):
        done.append(save_checkpoint(*given, **options))
        if len(done) == saves:
            raise KeyboardInterrupt

    return save


def test_a_killed_training_goes_on_in_mid_epoch_with_the_same_metrics(windowed, store, tmp_path):
    whole, more = windowed, ("--store", store, *WINDOWS)
    directory = tmp_path / "killed"
    command = [sys.executable, "-m", "dspark_store.train", *flags(directory, *more)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    try:
        deadline = time.monotonic() + 200
        while not (directory / "checkpoints" / "step-00000008").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert checkpoints(directory / "checkpoints")[-1].name < "step-00000030", "it ended before it was killed"
    assert (directory / LOCK_KEY).exists()  # of a process that is gone: taken at once
    assert main(flags(directory, *more, "--resume")) == 0
    assert metrics_so_far(directory) == metrics_so_far(whole)
    assert same(drafts(directory), drafts(whole))


def metrics_so_far(directory):
    return (directory / "metrics.jsonl").read_text().splitlines()


def test_a_finished_training_is_not_begun_again_unasked(store, tmp_path, capsys):
    run(tmp_path / "run", "--store", store, "--max-steps", 2)
    assert main(flags(tmp_path / "run", "--store", store)) == 2
    assert "has checkpoints: pass --resume" in capsys.readouterr().err


def test_going_on_with_a_finished_training_changes_nothing(store, tmp_path, capsys):
    more = ("--store", store, "--epochs", 2, "--max-steps", 4, "--validation-fraction", 0.3)
    directory = run(tmp_path / "run", *more)
    before, lines = states_of_files(directory / "checkpoints"), metrics_so_far(directory)
    capsys.readouterr()
    assert main(flags(directory, *more, "--resume")) == 0
    assert capsys.readouterr().out == "nothing is left to do: 4 steps are done, of 4\n"
    assert states_of_files(directory / "checkpoints") == before
    assert metrics_so_far(directory) == lines


def test_another_draft_does_not_go_on_from_a_checkpoint(store, tmp_path, capsys):
    run(tmp_path / "run", "--store", store, "--max-steps", 1)
    for more, named in (
        (("--mask-token-id", 99), "mask_token_id of the checkpoint is 287"),
        (("--layers", 1), "layers"),
    ):
        assert main(flags(tmp_path / "run", "--store", store, "--resume", *more)) == 2
        assert named in capsys.readouterr().err


def test_other_settings_are_warned_of(store, tmp_path, caplog):
    run(tmp_path / "run", "--store", store, "--max-steps", 1)
    run(tmp_path / "run", "--store", store, "--max-steps", 2, "--resume", "--clip", 2)
    assert "settings differ from those that the training was begun with: clip, max_steps" in caplog.text


def test_only_the_newest_checkpoints_are_kept(store, tmp_path):
    more = ("--checkpoint-every", 1, "--keep-checkpoints", 2, "--max-steps", 5)
    directory = run(tmp_path / "run", "--store", store, *more) / "checkpoints"
    assert sorted(path.name for path in directory.iterdir()) == ["step-00000004", "step-00000005"]


def test_validation_samples_are_judged_and_not_trained_on(store, tmp_path):
    more = ("--validation-fraction", 0.3, "--validate-every", 2, "--max-steps", 4, "--learning-rate", 0)
    directory = run(tmp_path / "run", "--store", store, *more, "--warmup-ratio", 0, "--epochs", 9)
    lines = metrics(directory, "validation")
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert lines == [{**lines[0], "step": step} for step in (0, 2, 4)]  # at a rate of 0 nothing is learned


def test_the_summary_tells_of_waiting_memory_tau_and_the_steps_of_its_own(store, tmp_path, capsys):
    run(tmp_path / "run", "--store", store, "--max-steps", 2, "--validation-fraction", 0.3)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 steps in ")
    assert "waited for data" in lines[0]
    assert "of memory" in lines[0]
    assert lines[1].startswith("validation: loss ")
    run(tmp_path / "run", "--store", store, "--max-steps", 3, "--validation-fraction", 0.3, "--resume")
    assert capsys.readouterr().out.startswith("1 steps after the 2 that were there in ")


def test_a_training_writes_neither_into_a_store_nor_over_a_file(store, tmp_path, capsys):
    before = sorted(path.name for path in store.iterdir())
    (tmp_path / "file").write_text("mine")
    for output, message in (
        (store, "is inside the store"),
        (store / "draft", "is inside the store"),
        (tmp_path / "file", "is a file: give a directory"),
    ):
        assert main(flags(output, "--store", store)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert sorted(path.name for path in store.iterdir()) == before


def test_a_training_from_a_store_does_not_even_import_what_runs_a_target(store, tmp_path):
    code = (
        "import sys; from dspark_store.train import main; main(sys.argv[1:]); sys.exit('transformers' in sys.modules)"
    )
    words = flags(tmp_path / "run", "--store", store, "--max-steps", 1, "--validation-fraction", 0.3)
    done = run_python("-c", code, *words)
    assert done.returncode == 0, done.stderr
    assert "1 steps in " in done.stdout


def test_a_gradient_that_is_not_finite_ends_the_command(store, tmp_path, capsys):
    assert main(flags(tmp_path / "run", "--store", store, "--learning-rate", 1e30, "--warmup-ratio", 0)) == 3
    assert "is not finite" in capsys.readouterr().err.splitlines()[-1]


def test_bf16_trains_with_weights_in_fp32(store, tmp_path):
    directory = run(tmp_path / "run", "--store", store, "--dtype", "bf16", "--max-steps", 3)
    assert {tensor.dtype for tensor in drafts(directory).values()} == {torch.float32}
    exact = metrics(run(tmp_path / "exact", "--store", store, "--max-steps", 3))
    for line, other in zip(metrics(directory), exact, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=0.05)
        assert line["loss"] != other["loss"]


def test_two_ranks_learn_what_one_learns_from_the_same_global_batches(store, tmp_path):
    more = ("--store", store, "--max-steps", 2, "--accumulate", 2, "--validation-fraction", 0.1)
    alone = run(tmp_path / "alone", *more, "--batch-size", 2)
    words = flags(tmp_path / "two", *more, "--batch-size", 1)
    done = run_python(*TWO_RANKS, "-m", "dspark_store.train", *words)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "\r" not in done.stderr
    assert done.stderr.count(" train: 100% (2 of 2 steps), ") == 1  # of one rank
    for kind in ("train", "validation"):
        pairs = list(zip(metrics(alone, kind), metrics(tmp_path / "two", kind), strict=True))
        assert pairs
        for one, two in pairs:
            names = ("tau", "accept", "loss", "learning_rate") if kind == "train" else ("tau", "accept", "prefix_bias")
            assert [one[name] for name in names] == pytest.approx([two[name] for name in names], rel=1e-3)
            if kind == "train":
                assert one["gradient_norm"] == pytest.approx(two["gradient_norm"], rel=1e-4)
    first, second = drafts(alone), drafts(tmp_path / "two")
    assert all(torch.allclose(first[name], second[name], atol=1e-3) for name in first)


def test_ranks_that_have_the_same_error_tell_it_once(store, tmp_path):
    words = flags(tmp_path / "run", "--store", store, "--mask-token-id", 288)
    done = run_python(*TWO_RANKS, "-m", "dspark_store.train", *words)
    assert done.returncode != 0
    told = [line[15:] for line in done.stderr.splitlines() if line.startswith("error: rank ")]
    assert told == ["mask_token_id 288 is outside the vocabulary of 288"]
    assert not (tmp_path / "run" / "checkpoints").exists()
