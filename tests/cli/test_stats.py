"""``dspark-store stats``: what it writes, where, and what it says of a store that it cannot read."""

import json
import sys

import pytest

from dspark_store.cli.main import main
from tests.precompute.jobs import precompute
from tests.stores import build_store, flip
from tests.tiny import save_target_dir, tiny_qwen3, write_chats


@pytest.fixture
def store(tmp_path):
    return build_store(tmp_path / "store").path


def figures_in(directory):
    return json.loads((directory / "stats.json").read_text())


def refused(words, capsys):
    assert main(["stats", *map(str, words)]) == 2
    return capsys.readouterr().err


def test_both_files_are_written_beside_the_store_and_nothing_in_it(store, capsys):
    before = sorted(store.rglob("*"))
    assert main(["stats", str(store)]) == 0
    output = store.with_name("store-stats")
    assert sorted(path.name for path in output.iterdir()) == ["stats.html", "stats.json"]
    assert sorted(store.rglob("*")) == before
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "7 samples, 78 tokens, 66.67 % supervised, 78 token ids used"
    assert [line.split(":")[0] for line in printed[1:]] == ["layer -1", "layer 2", "layer 5", "written"]


def test_a_relative_path_is_written_in_full(store, monkeypatch):
    monkeypatch.chdir(store)
    assert main(["stats", "."]) == 0
    assert figures_in(store.with_name("store-stats"))["store"]["path"] == str(store)


def test_running_again_writes_the_same_bytes(store, tmp_path):
    for name in ("one", "other"):
        assert main(["stats", str(store), "--output", str(tmp_path / name)]) == 0
    for name in ("stats.json", "stats.html"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


def test_a_growing_store_is_no_error(tmp_path, capsys):
    store = build_store(tmp_path / "store", without_shards=(1,), shared_last=False).path
    assert main(["stats", str(store)]) == 0
    printed = capsys.readouterr().out
    assert "growing: the states of 2 of 3 shards are captured" in printed
    assert "last hidden states: norm" in printed


def test_layers_and_samples_can_be_chosen(store, tmp_path):
    words = ["--layers", "-1", "last", "--samples", "2", "--seed", "4", "--threads", "1", "--outlier-factor", "3"]
    assert main(["stats", str(store), "--output", str(tmp_path / "out"), *words]) == 0
    figures = figures_in(tmp_path / "out")
    assert figures["read"] == {
        "samples": 2,
        "samples_with_states": 2,
        "drawn": True,
        "seed": 4,
        "layers": [-1],
        "last_hidden_states": True,
    }
    assert figures["layers"][0]["channels"]["outliers"]["factor"] == 3


def test_mistakes_are_one_line(store, tmp_path, capsys):
    assert "layer 7 was not captured; the store has [2, -1, 5]" in refused([store, "--layers", "7"], capsys)
    assert "--layers takes the ids of captured layers, and 'last', got 'x'" in refused([store, "--layers", "x"], capsys)
    assert "--output" in refused([store, "--output", store / "stats"], capsys)
    assert "inside the store" in refused([store, "--output", store], capsys)
    assert "--threads must be >= 1, got 0" in refused([store, "--threads", "0"], capsys)
    assert "--outlier-factor must be >= 1" in refused([store, "--outlier-factor", "nan"], capsys)
    assert "--samples must be >= 1, got -2" in refused([store, "--samples", "-2"], capsys)
    assert "still in its token phase" in refused([build_store(tmp_path / "t", until="tokens").path], capsys)
    assert "manifest not found" in refused([tmp_path / "nowhere"], capsys)
    assert not (tmp_path / "store-stats").exists()


def test_a_damaged_store_is_told_in_one_line_and_nothing_is_written(store, capsys):
    flip(store / "target_hidden_states" / "c.1.0.0", 40)
    assert main(["stats", str(store)]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "target_hidden_states/c.1.0.0" in last
    assert "dspark-store verify" in last
    assert not store.with_name("store-stats").exists()


def test_the_targets_tokenizer_is_found_by_itself(tmp_path, capsys):
    target = tmp_path / "target"
    save_target_dir(target, tiny_qwen3())
    write_chats(tmp_path / "chats.jsonl", 5)
    store = precompute(target, tmp_path / "chats.jsonl", tmp_path / "store")
    assert main(["stats", str(store)]) == 0
    figures = figures_in(tmp_path / "store-stats")
    texts = [item["text"] for item in figures["vocabulary"]["all"]["top"]]
    assert "<|end|>" in texts
    assert figures["vocabulary"]["size"] == 288
    (target / "tokenizer.json").write_text("{")
    assert main(["stats", str(store)]) == 0
    assert "tokens are shown as ids" in capsys.readouterr().err
    assert main(["stats", str(store), "--tokenizer", str(target)]) == 2


def test_without_matplotlib_the_figures_are_written_and_a_line_says_what_the_page_needs(store, capsys, monkeypatch):
    assert main(["stats", str(store)]) == 0
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "dspark_store.inspection.stats.page", raising=False)
    assert main(["stats", str(store)]) == 0
    printed = capsys.readouterr()
    assert "pip install 'dspark-store[plot]'" in printed.err.splitlines()[-1]
    assert printed.out.splitlines()[-1].endswith("stats.json")
    output = store.with_name("store-stats")
    assert [path.name for path in output.iterdir()] == ["stats.json"]


def test_an_output_that_cannot_be_made_is_told_of_before_the_pass(store, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "dspark_store.inspection.stats.survey.measure_store", lambda *_, **__: pytest.fail("a pass was made")
    )
    (tmp_path / "file").write_text("")
    refused([store, "--output", tmp_path / "file" / "stats"], capsys)


def test_a_damaged_store_leaves_no_folder_behind(store, tmp_path):
    flip(store / "target_hidden_states" / "c.0.0.0", 30)
    assert main(["stats", str(store), "--output", str(tmp_path / "new" / "stats")]) == 1
    assert not (tmp_path / "new").exists()
