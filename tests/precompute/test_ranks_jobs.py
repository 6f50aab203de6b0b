"""The whole command with several ranks: two jobs on one store, torchrun itself, and every way of running it."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dspark_store.format.storage import LocalStorage
from dspark_store.writers.lock import LOCK_KEY
from dspark_store.writers.process import ProcessName
from tests.crash.orders import Plant, Strike
from tests.precompute.jobs import arguments, states_of_files
from tests.precompute.rank_jobs import BATCHES, assert_same_store

pytestmark = pytest.mark.timeout(900)
PREEMPTION_SECONDS = 10
CONFIGS = Path(__file__).parents[1] / "compat" / "configs"


def test_a_second_job_is_refused_and_told_to_take_over_it_does(jobs, tmp_path):
    store = tmp_path / "store"
    pace = tuple(Plant(rank, "forward", "each", 5.0) for rank in range(2))
    first = jobs.start(store, world=2, plants=pace, gate=True)
    first.wait_for("forward")
    second = jobs.start(store, "--resume").wait()
    assert second.exit_code == 2
    assert re.search(
        r"is being written by process \d+ on \S+ since [^(]+ \(last sign of life \d+ s ago\); wait", second.log
    )
    third = jobs.run(store, "--resume", "--take-over", world=2)
    outcome = first.wait()
    assert outcome.exit_codes == [3, 3]
    assert "Traceback" not in outcome.log
    assert ["taken over by another job" in log for log in outcome.logs] == [True, True], outcome.log
    assert outcome.seconds_after(third.ends.started) < third.seconds
    jobs.assert_equals_whole(store)


def test_a_take_over_that_is_told_to_end_while_it_waits_leaves_no_lock(jobs, tmp_path):
    store = tmp_path / "store"
    former = replace(ProcessName.own(), host="elsewhere").to_json()
    LocalStorage(store).put(LOCK_KEY, former.encode())
    outcome = jobs.start(store, "--take-over", strike=Strike(event="plan", number=signal.SIGTERM)).wait()
    assert outcome.exit_code == 143, outcome.log
    assert outcome.seconds_after(outcome.ends.struck) < PREEMPTION_SECONDS
    assert outcome.log.endswith("stopped: terminated: what is committed stays; go on with --resume\n")
    assert list(store.iterdir()) == []


def test_a_rank_that_comes_late_finds_the_smoke_test(jobs, tmp_path):
    late = Plant(rank=1, stage="load", what="sleep", seconds=2.0)
    done = jobs.run(tmp_path / "store", "--smoke", 2, world=2, plants=(late,))
    assert "smoke test passed" in done.logs[0]
    jobs.assert_equals_whole(tmp_path / "store")


def test_two_ranks_estimate_try_out_finish_and_find_nothing_to_do(jobs, tmp_path):
    store = tmp_path / "store"
    estimate = jobs.run(store, "--estimate", world=2)
    assert "2,030" in estimate.logs[0]
    assert (estimate.logs[1], estimate.forwards, store.exists()) == ("", 0, False)
    done = jobs.run(store, "--smoke", 3, "--profile", world=2, gate=True)
    assert "smoke test passed: 3 samples were written, read back and checked" in done.logs[0]
    assert "rank 1 profile  forward" in done.logs[1]
    assert done.forwards == BATCHES + 2
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    jobs.assert_equals_whole(store)
    before = states_of_files(store)
    again = jobs.run(store, "--resume", world=2)
    assert f"{store} is complete; nothing to do" in again.logs[0]
    assert (again.forwards, states_of_files(store)) == (0, before)


def test_two_ranks_run_a_file_that_was_written_for_automodel(jobs, tmp_path):
    whole = jobs.whole(target="dense")
    text = (CONFIGS / "replicated.yaml").read_text()
    stores: list[Path] = []
    for world in (1, 2):
        root = tmp_path / str(world)
        root.mkdir()
        (root / "target").symlink_to(whole.parent / "dense")
        (root / "data.jsonl").symlink_to(whole.parent / "chats.jsonl")
        (root / "config.yaml").write_text(text.replace("{root}", str(root)).replace("nccl", "gloo"))
        outcome = jobs.start_command(root / "store", "-c", root / "config.yaml", "--device", "cpu", world=world).wait()
        assert outcome.exit_codes == [0] * world, outcome.log
        stores.append(root / "store")
    assert_same_store(stores[1], stores[0], but=("target_model", "target_model_name_or_path", "train_data_path"))


@pytest.mark.storm
def test_torchrun_runs_the_same_command(jobs, tmp_path):
    whole = jobs.whole()
    place, torchrun = whole.parent, ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    layers = ("--target-layer-ids", "-1", "1", "3", "5", "--encode-threads", "1")
    flags = arguments(place / "moe", place / "chats.jsonl", tmp_path / "store", *layers, "--fsdp-size", 2)
    command = [sys.executable, "-m", *torchrun, "-m", "dspark_store.precompute", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "captured 2,030 tokens of 6 shards" in done.stdout
    assert done.stderr.count(" capture: 100% (2,030 of 2,030 tokens), ") == 1
    assert "%|" not in done.stderr
    jobs.assert_equals_whole(tmp_path / "store")
    refused = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert refused.returncode != 0
    assert "error: rank 0: " in refused.stderr
    assert "is finished: pass --resume to go on with it" in refused.stderr
