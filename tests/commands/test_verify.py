"""``dspark-store verify``."""

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
