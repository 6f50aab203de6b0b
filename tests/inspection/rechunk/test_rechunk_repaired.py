"""A copy that was damaged and repaired is filled up by the command that made it."""

import pytest

from dspark_store.cli.main import main
from tests.inspection.rechunk.copies import MANIFEST, contents
from tests.stores import build_store, flip


@pytest.mark.parametrize(
    "key",
    [
        "target_hidden_states/c.1.0.0",
        "target_last_hidden_states/c.0.0.0",
        "input_ids/c.1.0",
        "loss_mask/c.0.0",
        "target/embed_tokens/weight/c.0.0",
        "index/length/c.0",
        "ledger/states/c.1.0.0",
    ],
)
def test_a_repaired_copy_is_made_whole_by_the_same_command(tmp_path, capsys, key):
    source = build_store(tmp_path / "source", fields={"manifest": MANIFEST}).path
    copy = tmp_path / "copy"
    command = ["rechunk", str(source), str(copy), "--codec", "fast", "--shard-size", "4"]
    assert main(command) == 0
    before = contents(copy)
    flip(copy / key, 30)
    assert main(["verify", str(copy)]) == 1
    assert main(["repair", str(copy)]) == 0
    printed = capsys.readouterr().out
    assert "is complete" in printed or "run the dspark-store rechunk that made" in printed
    assert main(command) == 0
    assert contents(copy) == before
