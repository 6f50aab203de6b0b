"""``dspark-store rechunk``."""

import os

import pytest

from dspark_store.cli.main import main
from tests.inspection.copies import MANIFEST, assert_copied
from tests.stores import build_store, flip


@pytest.fixture(autouse=True)
def unsynced(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def store(tmp_path):
    return build_store(tmp_path / "store", fields={"manifest": MANIFEST}).path


def rechunk(store, *flags):
    return main(["rechunk", str(store), str(store.parent / "copy"), *map(str, flags)])


def test_a_copy_is_made_under_the_settings_that_were_given(store, capsys):
    assert rechunk(store, "--codec", "none", "--chunk-tokens", 4, "--shard-size", 2, "--layers", 5, -1) == 0
    printed = capsys.readouterr().out
    assert "7 samples are copied, read back and compared" in printed
    assert (
        " of ragged bf16 rows of 3 vectors (bf16, none, 4 tokens per chunk, 2 samples per shard, 2 layers)" in printed
    )
    assert assert_copied(store, store.parent / "copy", layers=(-1, 5)).schema.codec == "none"


def test_the_same_command_again_has_nothing_to_do(store, capsys):
    assert rechunk(store, "--threads", 1) == 0
    assert rechunk(store) == 0
    assert "is complete; nothing to do" in capsys.readouterr().out


def test_a_damaged_source_exits_with_1_and_names_the_object(store, capsys):
    flip(store / "target_hidden_states" / "c.1.0.0", 40)
    assert rechunk(store) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert "target_hidden_states/c.1.0.0" in line
    assert f"dspark-store verify {store}" in line
    assert "what is committed in" in line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--shard-size", 0), "shard_size must be >= 1, got 0"),
        (("--threads", 0), "--threads must be >= 1, got 0"),
        (("--layers", 77), "layer 77 is not in the source, which has [2, -1, 5]"),
        (("--codec", "zip"), "invalid choice: 'zip'"),
        (("--scheduler", "nowhere"), "no dask scheduler answers at nowhere"),
    ],
)
def test_a_mistake_is_told_in_one_line_and_leaves_nothing(store, capsys, monkeypatch, flags, words):
    monkeypatch.setattr("dspark_store.inspection.shardwise._CONNECT_SECONDS", 1)
    try:
        code = rechunk(store, *flags)
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert not (store.parent / "copy").exists()


def test_a_source_that_is_no_store_is_named(tmp_path, capsys):
    assert main(["rechunk", str(tmp_path), str(tmp_path.parent / "copy")]) == 2
    assert "holds no dspark-store" in capsys.readouterr().err
