"""``dspark-store verify``."""

import json
import shutil

import pytest

from dspark_store.cli.main import main
from dspark_store.format.schema import LAST, LAYERS
from tests.precompute.jobs import precompute
from tests.processes import run_python
from tests.stores import build_store, flip
from tests.tiny import save_target_dir, tiny_qwen3, write_chats


@pytest.fixture
def store(tmp_path):
    return build_store(tmp_path / "store", codec="none").path


def verified(capsys, code, store, *arguments):
    """Run the command, which must end with ``code``; return what it printed."""
    capsys.readouterr()
    assert main(["verify", str(store), *arguments]) == code
    return capsys.readouterr().out


def test_a_good_store_verifies(store, capsys):
    assert verified(capsys, 0, store).startswith("7 samples checked, 0 problems (3 shards, ")


def test_a_flipped_bit_is_named_with_its_samples_and_fails(store, capsys):
    flip(store / LAYERS / "c.1.0.0", 40)
    problem, summary = verified(capsys, 1, store).splitlines()
    assert problem.startswith(f"{LAYERS}/c.1.0.0: slot 0: chunk checksum is ")
    assert problem.endswith("(sample 3)")
    assert summary.startswith("7 samples checked, 1 problem, which hit 1 samples (3 shards, ")


def test_a_quick_check_says_so_and_reads_no_chunk(store, capsys):
    flip(store / LAYERS / "c.1.0.0", 40)
    assert "(3 shards, sizes and trailers only)" in verified(capsys, 0, store, "--quick")
    (store / LAST / "c.2.0.0").unlink()
    assert f"{LAST}/c.2.0.0: is missing (sample 6)\n" in verified(capsys, 1, store, "--quick")


def test_json_holds_every_problem(store, capsys):
    flip(store / LAYERS / "c.1.0.0", 40)
    found = json.loads(verified(capsys, 1, store, "--json", "--threads", "2"))
    assert (found["samples"], found["shards"], found["quick"], found["recomputed"]) == (7, 3, False, [])
    (problem,) = found["problems"]
    assert problem.pop("message").startswith("slot 0: chunk checksum is ")
    assert problem == {"part": "states", "key": f"{LAYERS}/c.1.0.0", "shard": 1, "samples": [3]}


def test_many_problems_are_cut_short(store, capsys):
    for number in range(60):
        (store / LAST / f"c.{number}.9.9").touch()
    lines = verified(capsys, 1, store).splitlines()
    assert len(lines) == 52
    assert lines[50] == "... and 10 more problems; --json lists them all"


def test_where_there_is_no_store_one_line_says_so(tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: manifest not found: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recompute", "2"], "--recompute and --target-model go together"),
        (["--target-model", "x"], "--recompute and --target-model go together"),
        (["--recompute", "0", "--target-model", "x"], "must be at least 1, got 0"),
        (["--threads", "0"], "--threads must be >= 1, got 0"),
        (["--recompute", "1", "--target-model", "x"], "its states cannot be recomputed, since no precompute wrote it"),
    ],
)
def test_what_makes_no_sense_is_refused(store, arguments, message, capsys):
    assert main(["verify", str(store), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_checking_a_store_does_not_wait_for_torch(store):
    code = "import sys; from dspark_store.cli.main import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    assert run_python("-c", code, "verify", store).returncode == 0


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """A target, and the store of a precompute of it."""
    place = tmp_path_factory.mktemp("captured")
    target = save_target_dir(place / "target")
    chats = write_chats(place / "chats.jsonl", 11)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        return target, precompute(target, chats, place / "store")


def test_recomputed_samples_are_equal_bit_by_bit(captured, capsys):
    target, store = captured
    printed = verified(capsys, 0, store, "--recompute", "3", "--target-model", str(target))
    assert "3 samples recomputed, 3 equal bit by bit\n" in printed


def test_all_samples_can_be_recomputed_and_a_seed_draws_others(captured, capsys):
    target, store = captured
    options = ("--json", "--target-model", str(target), "--recompute")
    every = json.loads(verified(capsys, 0, store, *options, "99"))["recomputed"]
    assert every == [{"sample": sample, "difference": 0.0} for sample in range(11)]
    drawn = [json.loads(verified(capsys, 0, store, *options, "3", "--seed", seed))["recomputed"] for seed in "112"]
    assert drawn[0] == drawn[1] != drawn[2]


def test_states_of_another_target_differ(captured, tmp_path, capsys):
    """The weights are those of the store, and what is computed with them is not: only a fresh forward tells."""
    target, store = captured
    other = shutil.copytree(target, tmp_path / "other")
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 0.01}))
    options = ("--recompute", "2", "--target-model", str(other))
    printed = verified(capsys, 1, store, *options)
    assert printed.count("differs from a fresh forward of the target by up to") == 2
    assert "2 samples recomputed, 0 equal bit by bit; the largest difference is " in printed
    assert verified(capsys, 0, store, *options, "--tolerance", "100").count("differs from") == 0


def test_a_target_with_other_weights_is_refused(captured, tmp_path, capsys):
    _, store = captured
    other = save_target_dir(tmp_path / "other", tiny_qwen3())
    assert main(["verify", str(store), "--recompute", "1", "--target-model", str(other)]) == 2
    assert "has other weights" in capsys.readouterr().err


def test_damaged_samples_are_not_recomputed(captured, tmp_path, capsys):
    target, store = captured
    damaged = shutil.copytree(store, tmp_path / "store")
    flip(damaged / LAST / "c.0.0.0", 100)
    found = json.loads(verified(capsys, 1, damaged, "--json", "--recompute", "99", "--target-model", str(target)))
    hit = {sample for problem in found["problems"] for sample in problem["samples"]}
    assert hit
    assert hit.isdisjoint(result["sample"] for result in found["recomputed"])
    assert len(found["recomputed"]) == 11 - len(hit)


def test_a_sample_that_only_reading_finds_damaged_is_a_problem(captured, tmp_path, capsys):
    target, store = captured
    damaged = shutil.copytree(store, tmp_path / "store")
    flip(damaged / LAST / "c.0.0.0", 100)
    options = ("--quick", "--json", "--recompute", "99", "--target-model", str(target))
    found = json.loads(verified(capsys, 1, damaged, *options))
    (problem,) = found["problems"]
    assert "cannot be recomputed: " in problem["message"]
    assert len(found["recomputed"]) == 10


def test_a_device_that_is_not_there_is_refused(captured, capsys):
    target, store = captured
    options = ["--recompute", "1", "--target-model", str(target), "--device", "abacus"]
    assert main(["verify", str(store), *options]) == 2
    assert "device 'abacus' is unknown" in capsys.readouterr().err


def test_states_are_checked_while_tokens_of_a_repaired_store_are_still_to_be_made(tmp_path, capsys):
    store = build_store(tmp_path / "store").path
    flip(store / "input_ids" / "c.1.0", 20)
    assert main(["repair", str(store)]) == 0
    assert main(["verify", str(store)]) == 0
    flip(store / "target_hidden_states" / "c.0.0.1", 30)
    assert main(["verify", str(store)]) == 1
    assert "target_hidden_states/c.0.0.1" in capsys.readouterr().out


def test_what_was_found_is_listed_also_when_nothing_can_be_recomputed(tmp_path, capsys):
    store = build_store(tmp_path / "store").path
    flip(store / "index" / "length" / "zarr.json", 30)
    assert main(["verify", str(store), "--recompute", "1", "--target-model", str(tmp_path)]) == 1
    assert "index/length/zarr.json" in capsys.readouterr().out
