"""``dspark-store repair``: what it says and how it ends, in stores of any phase."""

import json

import pytest

from dspark_store.cli import main
from dspark_store.format.manifest import ATTRIBUTE
from dspark_store.inspection.repair import repair as repair_module
from dspark_store.writers.lock import LostLockError
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
        root["attributes"][ATTRIBUTE]["format_version"] = 2
        (store / name).write_text(json.dumps(root))
    assert main(["repair", str(store)]) == 2
    assert "format_version 2" in capsys.readouterr().err
