"""``dspark-store``: the commands beside the main job."""

import pytest

from dspark_store.cli import main
from tests.stores import build_store, flip


@pytest.fixture
def store(tmp_path):
    return build_store(tmp_path / "store").path


def test_a_good_store_verifies(store, capsys):
    assert main(["verify", str(store)]) == 0
    assert "7 samples checked, 0 problems" in capsys.readouterr().out


def test_a_flipped_byte_is_named_and_fails(store, capsys):
    flip(store / "target_last_hidden_states" / "c.1.0.0", 40)
    assert main(["verify", str(store)]) == 1
    printed = capsys.readouterr().out
    assert "target_last_hidden_states/c.1.0.0" in printed
    assert "samples [" in printed


def test_a_directory_without_a_store_is_one_line_and_exit_code_2(tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: manifest not found")


def test_precompute_is_the_main_job(capsys):
    assert main(["precompute"]) == 2
    assert "required but not given: --target-model" in capsys.readouterr().err
