"""A store that was damaged, repaired and resumed is the store that it was, bit by bit."""

import json
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from dspark_store import open_cache
from dspark_store.cli.main import main
from dspark_store.format.arrays import pack_array
from dspark_store.format.metadata import COPY_KEY, ROOT_KEY, read_record
from dspark_store.format.schema import LAST, LAYERS
from dspark_store.format.storage import LocalStorage
from dspark_store.inspection.repair.plan import plan_repair
from dspark_store.inspection.repair.roots import BeyondRepairError
from dspark_store.inspection.shardwise import Workers
from dspark_store.inspection.verification import verify
from dspark_store.precompute import tokenise as tokenise_module
from dspark_store.precompute.__main__ import main as precompute
from dspark_store.writers.lock import LOCK_KEY, StoreLock
from dspark_store.writers.tokens import write_token_shard
from tests.crash.damage import kind_of
from tests.inspection.copies import contents
from tests.inspection.faults import SHAPES, FaultKind, build_victims, copy_store, plant
from tests.inspection.patients import make_patient, mended
from tests.precompute.jobs import states_of_files
from tests.readers.test_foreign import rewrite
from tests.stores import Shape, build_store, flip

pytestmark = pytest.mark.usefixtures("unsynced")

KINDS = ("inner layers", "tied", "blend")


@pytest.fixture(scope="module")
def patients(tmp_path_factory):
    made = {}

    def patient(kind):
        if kind not in made:
            made[kind] = make_patient(tmp_path_factory.mktemp("patients") / "one", kind)
        return made[kind]

    return patient


@pytest.fixture
def store(tmp_path):
    return build_store(tmp_path / "store", **SHAPES["sources"]).path


def heal(patient, store):
    """Repair a store, resume its job where that is needed, and check that only what was bad was done again."""
    plan = mended(store)
    assert not plan.empty
    captured = 0 if plan.record.complete else patient.resume(store)
    assert captured == plan.samples
    patient.check_whole(store, captured=captured > 0)
    assert mended(store).empty
    return plan


def heal_faults(patient, folder, kinds, seed):
    store = patient.copy(folder / "damaged")
    for number, kind in enumerate(kinds):
        with suppress(ValueError, OSError):  # what the first fault has left may be too little for another
            plant(store, kind, seed + 1000 * number, patient.others)
    try:
        heal(patient, store)
    except BeyondRepairError:  # both places of the manifest at once
        root = (patient.store / ROOT_KEY).read_bytes()
        assert all(not (store / key).exists() or (store / key).read_bytes() != root for key in (ROOT_KEY, COPY_KEY))
    shutil.rmtree(store)


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_with_any_fault_becomes_what_it_was(kind, patients, tmp_path):
    for fault in FaultKind:
        heal_faults(patients(kind), tmp_path, [fault], seed=7)


def test_every_kind_of_object_is_put_back_or_made_again(patients, tmp_path):
    patient = patients("blend")
    kinds = {kind_of(key): key for key in sorted(contents(patient.store))}
    assert len(kinds) >= 15
    for key in kinds.values():
        store = patient.copy(tmp_path / "damaged")
        (store / key).unlink()
        heal(patient, store)
        shutil.rmtree(store)


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_with_several_faults_becomes_what_it_was(kind, patients, tmp_path):
    heal_faults(patients(kind), tmp_path, [FaultKind.FLIP, FaultKind.STALE_ROW, FaultKind.EDITED_JSON], seed=3)
    heal_faults(patients(kind), tmp_path, [FaultKind.DELETE, FaultKind.DELETE, FaultKind.TRUNCATE], seed=4)


@pytest.mark.storm
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", FaultKind)
def test_stores_with_five_hundred_faults_become_what_they_were(kind, fault, patients, tmp_path):
    for seed in range(100, 121):
        heal_faults(patients(kind), tmp_path, [fault], seed)


@pytest.mark.storm
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [200, 210, 220, 230])
def test_stores_with_three_faults_at_once_become_what_they_were(kind, first, patients, tmp_path):
    faults = list(FaultKind)
    for seed in range(first, first + 10):
        heal_faults(patients(kind), tmp_path, [faults[(seed * step) % 8] for step in (1, 3, 5)], seed)


def test_what_is_proved_by_the_rest_needs_no_precompute_and_is_as_it_was(tmp_path):
    for victim in build_victims(tmp_path / "victims", ["plain", "sources", "bias", "not shared"]):
        for number, fault in enumerate((FaultKind.EDITED_INDEX, FaultKind.EDITED_JSON)):
            root = copy_store(victim.path, tmp_path / "damaged")
            plant(root, fault, seed=20 + number, others=victim.others)
            plan = mended(root)
            assert plan.record.complete
            assert plan.restored
            assert contents(root) == contents(victim.path)
            shutil.rmtree(root)


@pytest.mark.parametrize("ledger", ["tokens", "states"])
def test_a_stale_row_is_put_right_by_the_table_and_the_objects(ledger, store):
    whole = contents(store)
    shutil.copyfile(store / f"ledger/{ledger}/c.0.0.0", store / f"ledger/{ledger}/c.1.0.0")
    (store / f"ledger/{ledger}/c.2.0.0").unlink()
    assert mended(store).restored == [f"ledger/{ledger}/c.1.0.0", f"ledger/{ledger}/c.2.0.0"]
    assert contents(store) == whole


def test_rows_and_table_that_are_damaged_together_are_made_again_where_nothing_proves_them(patients, tmp_path):
    patient = patients("tied")
    store = patient.copy(tmp_path / "store")
    (store / "index/objects/c.0.0.0").unlink()
    (store / "ledger/tokens/c.1.0.0").unlink()
    (store / "ledger/states/c.2.0.0").unlink()
    plan = heal(patient, store)
    assert (list(plan.tokens), list(plan.states)) == ([1], [])


def test_a_cursor_that_two_places_tell_otherwise_is_read_from_the_source_again(patients, tmp_path):
    patient = patients("tied")
    store = patient.copy(tmp_path / "store")
    row = np.frombuffer((store / "ledger/tokens/c.1.0.0").read_bytes()[:-4], "<u8").copy()
    row[4] += np.uint64(1)
    (store / "ledger/tokens/c.1.0.0").write_bytes(pack_array(row))
    assert "cursor" in heal(patient, store).tokens[1]
    (store / "ledger/tokens/c.1.0.0").write_bytes(pack_array(row))
    (store / "index/objects/c.0.0.0").unlink()
    assert list(heal(patient, store).tokens) == [0, 1, 2]


@pytest.mark.parametrize("shard", [0, 1, 2])
@pytest.mark.parametrize("kind", ["tied", "blend"])
def test_damaged_tokens_are_read_again_for_their_shard_alone(kind, shard, patients, tmp_path, monkeypatch):
    patient, written = patients(kind), []

    def write(storage, record, shard, *args):
        written.append(shard)
        write_token_shard(storage, record, shard, *args)

    monkeypatch.setattr(tokenise_module, "write_token_shard", write)
    store = patient.copy(tmp_path / "store")
    flip(store / f"input_ids/c.{shard}.0", 3)
    states = states_of_files(store / LAYERS)
    plan = heal(patient, store)
    assert (list(plan.tokens), list(plan.states), written) == ([shard], [], [shard])
    assert states == states_of_files(store / LAYERS)


def test_tokens_are_read_again_from_a_source_that_was_moved(patients, tmp_path):
    patient = patients("tied")
    store = patient.copy(tmp_path / "store")
    (store / "loss_mask/c.1.0").unlink()
    mended(store)
    at = patient.flags.index("--input-data") + 1
    moved = shutil.copy(patient.flags[at], tmp_path / "moved.jsonl")
    flags = [*patient.flags[:at], str(moved), *patient.flags[at + 1 :]]
    assert precompute([*flags, "--output-dir", str(store), "--resume"]) == 0
    patient.check_whole(store, captured=False)


def test_a_cursor_that_is_lost_with_the_row_before_is_found_in_the_table(patients, tmp_path):
    store = patients("blend").copy(tmp_path / "store")
    (store / "ledger/tokens/c.0.0.0").write_bytes(b"")
    flip(store / "loss_mask/c.1.0", 0)
    plan = heal(patients("blend"), store)
    assert list(plan.tokens) == [1]


def test_tokens_that_are_others_than_those_of_the_states_are_refused(patients, tmp_path, monkeypatch, capsys):
    patient = patients("tied")
    store = patient.copy(tmp_path / "store")
    (store / "loss_mask/c.1.0").unlink()
    mended(store)
    rows = tokenise_module._rows

    def other_rows(samples):
        samples[0].input_ids[0] += 1
        return rows(samples)

    monkeypatch.setattr(tokenise_module, "_rows", other_rows)
    before = contents(store)
    assert precompute([*patient.flags, "--output-dir", str(store), "--resume"]) == 2
    assert "the tokens that shard 1 is given now are not those of its states" in capsys.readouterr().err
    assert contents(store) == before


def hurt_everywhere(root):
    """Damage a store of three shards in many places, some of which the rest proves, and some not."""
    for key in ("index/length/c.0", "ledger/states/c.2.0.0", "input_ids/zarr.json", f"{LAYERS}/c.0.0.1", ROOT_KEY):
        (root / key).unlink()
    flip(root / "loss_mask/c.1.0", 0)
    flip(root / f"{LAST}/c.2.0.0", 0)
    flip(root / "target/embed_tokens/weight/c.0.0", 0)
    (root / "ledger/tokens/c.1.0.0").write_bytes(b"short")
    (root / "ledger/sources/c.0.0").write_bytes(b"")
    shutil.copy(root / f"{LAYERS}/c.1.0.0", root / f"{LAYERS}/c.9.0.0")


def damaged_from_the_root_up(root):
    """Damage a store where everything can be restored."""
    for key in ("index/status/c.0", "ledger/tokens/c.1.0.0", "index/objects/zarr.json", ROOT_KEY):
        (root / key).unlink()
    shutil.copyfile(root / f"{LAST}/c.1.0.0", root / "twin")
    (root / f"{LAST}/c.1.0.0").unlink()
    (root / "twin").rename(root / f"{LAST}/c.1.0.0")
    flip(root / f"{LAST}/c.1.0.0", 0)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("hurt", [hurt_everywhere, damaged_from_the_root_up])
def test_a_repair_that_ends_at_any_step_is_gone_on_with(hurt, store, tmp_path, monkeypatch):
    hurt(store)
    whole = copy_store(store, tmp_path / "whole")
    steps = len(mended(whole).storage.changes)
    assert steps >= 5
    for step in range(steps):
        root = copy_store(store, tmp_path / "interrupted")
        left = iter(range(step))

        def killing(call, left=left):
            def killed(*args):
                if next(left, None) is None:
                    raise Killed
                return call(*args)

            return killed

        with monkeypatch.context() as patch:
            for name in ("put", "link", "delete"):
                patch.setattr(LocalStorage, name, killing(getattr(LocalStorage, name)))
            with pytest.raises(Killed):
                mended(root)
        (root / "ledger" / f".c.0.0.0.{step}.tmp").write_bytes(b"half")
        mended(root)
        assert contents(root) == contents(whole), step
        shutil.rmtree(root)


KILLING = """
import os, signal, sys
from dspark_store.cli.main import main
replace, calls = os.replace, []
def killed(*args, **options):
    calls.append(args)
    if len(calls) == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(*args, **options)
os.replace = killed
main(["repair", sys.argv[1]])
"""


def test_a_killed_repair_leaves_a_lock_and_half_a_file_and_is_gone_on_with(store, tmp_path):
    hurt_everywhere(store)
    whole = copy_store(store, tmp_path / "whole")
    mended(whole)
    ended = subprocess.run([sys.executable, "-c", KILLING.format(step=4), str(store)], check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL
    assert (store / LOCK_KEY).exists()
    assert list(LocalStorage(store).temporaries())
    mended(store)
    assert contents(store) == contents(whole)


def test_a_good_store_is_left_alone(store, capsys):
    before = states_of_files(store)
    assert main(["repair", str(store)]) == 0
    assert capsys.readouterr().out == f"{store}: nothing to repair\n"
    assert before == states_of_files(store)


@pytest.mark.parametrize("until", ["tokens", "states"])
def test_a_good_growing_store_is_left_alone(until, tmp_path):
    built = build_store(tmp_path / "store", until=until, without_shards=(1,))
    assert mended(built.path).empty


def test_a_store_from_before_there_were_copies_is_left_alone_and_its_root_is_beyond_repair(tmp_path):
    old = Path(shutil.copytree(Path(__file__).parents[2] / "golden/v1/fp32-none", tmp_path / "old"))
    assert mended(old).empty
    flip(old / ROOT_KEY, 300)
    with pytest.raises(BeyondRepairError, match=r"zarr\.json of .* is damaged, and no good copy"):
        mended(old)


def test_a_dry_run_says_the_same_and_changes_nothing(store, capsys):
    hurt_everywhere(store)
    before = contents(store)
    assert main(["repair", str(store), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.endswith("dry run: nothing was changed\n")
    assert contents(store) == before
    assert main(["repair", str(store)]) == 0
    assert said.startswith(capsys.readouterr().out)


def test_the_command_says_what_it_did_and_what_is_to_be_done(patients, tmp_path, capsys):
    store = patients("tied").copy(tmp_path / "store")
    (store / "index/length/c.0").unlink()
    flip(store / "input_ids/c.0.0", 0)
    flip(store / f"{LAYERS}/c.2.0.1", 0)
    assert main(["repair", str(store)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.startswith("uncommitted  tokens of shard 0 (samples 0-3): object input_ids/c.0.0") for line in lines
    )
    assert any(line.startswith(f"uncommitted  states of shard 2 (samples 8-9): {LAYERS}/c.2.0.1") for line in lines)
    assert lines[-1] == (
        f"next: run the same precompute on {store} with --resume: it reads the tokens of 1 shard from the source, "
        "runs the target over 2 samples"
    )
    assert patients("tied").resume(store) == 2
    patients("tied").check_whole(store, captured=True)


def test_a_restored_store_is_complete_at_once(store, capsys):
    whole = contents(store)
    (store / "index/supervised/c.0").unlink()
    (store / ROOT_KEY).write_text("{}")
    assert main(["repair", str(store)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"restored     {ROOT_KEY}",
        "restored     index/supervised/c.0",
        f"{store} is complete",
    ]
    assert contents(store) == whole
    assert len(open_cache(store)) == 7


@pytest.mark.parametrize("table", ["embed_tokens", "lm_head"])
def test_swapped_objects_of_one_of_two_tied_tables_are_linked_from_the_other(table, tmp_path):
    store = build_store(tmp_path / "store", shape=Shape(vocab=300_000), lengths=(3,), tied=True).path
    whole = contents(store)
    first, second = (store / f"target/{table}/weight/c.{place}.0" for place in (0, 1))
    before = first.read_bytes(), second.read_bytes()
    for path, data in ((first, before[1]), (second, before[0])):
        path.unlink()
        path.write_bytes(data)
    assert mended(store).record.complete
    assert contents(store) == whole


def test_a_root_that_is_lost_with_its_copy_is_beyond_repair(store, capsys):
    (store / ROOT_KEY).unlink()
    (store / COPY_KEY).write_text("{}")
    before = contents(store)
    assert main(["repair", str(store)]) == 1
    assert "nothing else holds the manifest; put the file back from a backup" in capsys.readouterr().err
    assert contents(store) == before


def test_a_folder_without_a_store_is_a_mistake(tmp_path, capsys):
    assert main(["repair", str(tmp_path / "none")]) == 2
    assert f"error: there is no directory {tmp_path / 'none'}: " in capsys.readouterr().err
    assert main(["repair", str(tmp_path)]) == 2
    assert f"error: {tmp_path} holds no dspark-store: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_a_job_is_writing_is_refused(store, capsys):
    with StoreLock(LocalStorage(store)):
        before = contents(store)
        assert main(["repair", str(store)]) == 2
        assert "is being written by process" in capsys.readouterr().err
        assert contents(store) == before


def test_the_states_phase_is_mended_without_a_table(tmp_path):
    built = build_store(tmp_path / "store", until="states", lengths=(5,) * 12)
    whole = contents(built.path)
    (built.path / "ledger/states/c.0.0.0").write_bytes(b"unreadable")  # its objects say what it was
    flip(built.path / f"{LAST}/c.2.0.0", 0)
    row = np.frombuffer((built.path / "ledger/tokens/c.1.0.0").read_bytes()[:-4], "<u8").copy()
    (built.path / "ledger/tokens/c.1.0.0").write_bytes(pack_array(row + np.uint64(1)))
    plan = mended(built.path)
    assert (list(plan.tokens), list(plan.states)) == ([1], [2])
    assert (built.path / "ledger/states/c.0.0.0").read_bytes() == whole["ledger/states/c.0.0.0"]
    assert read_record(LocalStorage(built.path)).phase == "tokens"
    assert verify(LocalStorage(built.path)).problems == ()


def test_damage_to_a_store_that_waits_for_its_tokens_is_found_too(store):
    flip(store / "input_ids/c.0.0", 0)
    mended(store)
    (store / f"{LAST}/c.1.0.0").unlink()
    flip(store / "input_ids/c.2.0", 0)
    plan = mended(store)
    assert (list(plan.tokens), list(plan.states)) == ([2], [1])
    assert mended(store).empty


def test_a_column_that_another_tool_has_encoded_is_kept_and_never_made_again(tmp_path):
    built = build_store(tmp_path / "store")
    rewrite(built, LAYERS, (1, 20, 8))
    assert mended(built.path).empty
    whole = contents(built.path)
    (built.path / "index/digest/zarr.json").unlink()
    (built.path / ROOT_KEY).unlink()
    assert mended(built.path).record.complete
    assert contents(built.path) == whole
    flip(built.path / f"{LAST}/c.0.0.0", 0)
    with pytest.raises(BeyondRepairError, match=f"another tool has encoded {LAYERS} anew"):
        mended(built.path)


def test_a_store_of_another_writer_says_who_must_write_again(store, capsys):
    flip(store / f"{LAST}/c.0.0.0", 0)
    assert main(["repair", str(store)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("next: write the missing shards of ")


def test_the_workers_of_a_cluster_find_the_same(store, cluster):
    hurt_everywhere(store)
    there = plan_repair(str(store), Workers(scheduler=cluster.scheduler_address))
    here = plan_repair(str(store), Workers(threads=2))
    assert there.storage.changes == here.storage.changes
    assert (there.tokens, there.states, there.weights) == (here.tokens, here.states, here.weights)


@pytest.mark.parametrize("gone", [ROOT_KEY, COPY_KEY])
def test_a_root_of_another_store_is_never_believed(gone, patients, tmp_path):
    patient = patients("tied")
    store = patient.copy(tmp_path / "store")
    other = ROOT_KEY if gone == COPY_KEY else COPY_KEY
    (store / gone).unlink()
    (store / other).write_bytes((patient.others[0] / other).read_bytes())
    before = contents(store)
    with pytest.raises(BeyondRepairError, match="is of another store than the objects"):
        mended(store)
    assert contents(store) == before


def test_an_older_copy_never_wins_over_a_good_root(store):
    root = json.loads((store / ROOT_KEY).read_text())
    (store / COPY_KEY).write_bytes(contents(build_store(store.parent / "other", corpus=1).path)[ROOT_KEY])
    mended(store)
    assert json.loads((store / ROOT_KEY).read_text()) == root == json.loads((store / COPY_KEY).read_text())
