"""``dspark-store repair``: what it says and how it ends, in stores of any phase."""

import json
import os
import time
from dataclasses import replace

import pytest

from dspark_store.cli.main import main
from dspark_store.format.manifest import ATTRIBUTE
from dspark_store.inspection.repair import plan as repair_module
from dspark_store.inspection.shardwise import Workers
from dspark_store.writers.lock import LOCK_KEY, LostLockError
from dspark_store.writers.process import ProcessName
from tests.stores import build_store, flip


def test_damaged_tokens_of_a_store_without_a_number_of_samples_are_uncommitted(tmp_path, capsys):
    store = build_store(tmp_path / "store", until="tokens").path
    flip(store / "input_ids" / "c.1.0", 20)
    for words in (["--dry-run"], []):
        assert main(["repair", str(store), *words]) == 0
        assert "uncommitted  tokens of shard 1 (samples 3-5)" in capsys.readouterr().out
    assert not (store / "ledger" / "tokens" / "c.1.0.0").exists()


@pytest.mark.parametrize(
    "key", ["target_hidden_states/c.1.0.0", "index/length/c.0", "ledger/states/c.1.0.0", "zarr.json"]
)
def test_a_folder_in_the_place_of_an_object_is_damage_like_any_other(tmp_path, capsys, key):
    store = build_store(tmp_path / "store").path
    (store / key).unlink()
    (store / key).mkdir()
    assert main(["verify", str(store)]) == 1
    assert main(["repair", str(store), "--dry-run"]) == 0
    assert key in capsys.readouterr().out


def test_a_lock_that_was_lost_ends_a_repair_before_its_next_change(tmp_path, capsys, monkeypatch):
    store = build_store(tmp_path / "store").path
    flip(store / "target_hidden_states" / "c.1.0.0", 30)
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}

    def lost(*_):
        raise LostLockError("another job has taken the store over")

    monkeypatch.setattr(repair_module, "check_lock", lost)
    assert main(["repair", str(store)]) == 2
    assert "another job has taken the store over" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == before


def test_damaged_tables_are_forgotten_while_tokens_are_still_to_be_made(tmp_path):
    store = build_store(tmp_path / "store").path
    flip(store / "input_ids" / "c.1.0", 20)
    assert main(["repair", str(store)]) == 0  # back to the phase of tokens
    flip(store / "target" / "embed_tokens" / "weight" / "c.0.0", 20)
    assert main(["repair", str(store)]) == 0
    record = json.loads((store / "zarr.json").read_text())["attributes"][ATTRIBUTE]
    assert (record["phase"], record["weights"]) == ("tokens", {})


def test_a_store_of_another_format_version_is_refused_in_the_readers_words(tmp_path, capsys):
    store = build_store(tmp_path / "store").path
    for name in ("zarr.json", "ledger/states/root.json"):
        root = json.loads((store / name).read_text())
        root["attributes"][ATTRIBUTE]["format_version"] = 3
        (store / name).write_text(json.dumps(root))
    assert main(["repair", str(store)]) == 2
    assert "format_version 3" in capsys.readouterr().err


def lock_of(store, age, **process):
    """Put down the lock of another process with a heartbeat of so many seconds ago."""
    lock = store / LOCK_KEY
    lock.write_text(replace(ProcessName.own(), **process).to_json())
    then = time.time() - age
    os.utime(lock, (then, then))
    return lock


DEAD = {
    "of a process of this host that is gone": (0, {"started": "1"}),
    "silent": (1000, {"host": "elsewhere"}),
    "dated in the future": (-(10**6), {"host": "elsewhere"}),
}


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(("age", "process"), DEAD.values(), ids=DEAD)
def test_a_dead_lock_keeps_nobody_from_repairing(tmp_path, age, process, dry_run):
    store = build_store(tmp_path / "store").path
    flip(store / "target_hidden_states" / "c.1.0.0", 30)
    lock = lock_of(store, age, **process)
    plan = repair_module.repair(str(store), Workers(), dry_run=dry_run, watch_seconds=0.01)
    assert not plan.empty
    assert lock.exists() == dry_run


@pytest.mark.parametrize("words", [[], ["--dry-run"]])
@pytest.mark.parametrize("process", [{}, {"host": "elsewhere"}])
def test_the_lock_of_a_living_job_is_respected(tmp_path, capsys, words, process):
    store = build_store(tmp_path / "store").path
    flip(store / "target_hidden_states" / "c.1.0.0", 30)
    lock_of(store, 0, **process)
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    assert main(["repair", str(store), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"is being written by process {os.getpid()} on {process.get('host', ProcessName.own().host)}" in line
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == before
