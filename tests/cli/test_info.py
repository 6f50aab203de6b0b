"""``dspark-store info``."""

import argparse
import json

import pytest

from dspark_store.cli.info import add_arguments, bar
from dspark_store.cli.info import run as run_command
from dspark_store.cli.main import main
from tests.cli.test_terminal import Terminal
from tests.precompute.jobs import arguments, interrupted, precompute, rule_1
from tests.sources.words import CHAT, write_rows
from tests.stores import build_store, flip
from tests.tiny import save_target_dir, tiny_qwen3, write_chats


def told(store, capsys, code=0):
    assert main(["info", str(store)]) == code
    return capsys.readouterr().out


def entries(text):
    """Return what is said under each name, its lines joined."""
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        name = line[:10].strip() or name
        found[name] = f"{found.get(name, '')} {line[10:].strip()}".strip()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("info")
    save_target_dir(folder / "target", tiny_qwen3())
    write_chats(folder / "chats.jsonl", 11)
    return folder


def test_a_finished_job_is_told_on_one_screen(folder, capsys):
    store = precompute(folder / "target", folder / "chats.jsonl", folder / "done")
    capsys.readouterr()
    text = told(store, capsys)
    assert len(text.splitlines()) < 45
    said = entries(text)
    assert said["store"].replace(" ", "") == f"{store},complete"
    assert said["shards"] == "3 of up to 4 samples, all there"
    assert said["samples"].startswith("11 of ")
    assert "supervised (" in said["tokens"]
    assert "fp32, codec default" in said["layers"]
    assert said["size"].count(" of ragged bf16 rows of ") == said["padded"].count(" of ragged bf16 rows of ") == 1
    assert "class cpu exact" in said["made"]
    assert "(chat), " in said["data"]
    assert ", rule 2 for conversations, " in said["data"]
    assert "qwen3" in said["target"]
    assert "missing" not in said


def test_a_store_from_before_rules_had_numbers_is_of_rule_1(folder, tmp_path, capsys):
    chats = folder / "chats.jsonl"
    for name, data in (("alone", chats), ("blend", f"[{chats}, {{type: dummy, samples: 2, max_length: 4}}]")):
        with rule_1():
            store = precompute(folder / "target", data, tmp_path / name)
        capsys.readouterr()
        assert ", rule 1 for conversations" in entries(told(store, capsys))["data"]


def test_no_line_is_wider_than_80_columns_in_any_phase(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stores = [
        precompute(folder / "target", folder / "chats.jsonl", tmp_path / "finished"),
        build_store(tmp_path / ("a" * 150), until="tokens").path,
        build_store(tmp_path / "growing", lengths=(3,) * 120, without_shards=range(0, 40, 2)).path,
    ]
    for store in stores:
        capsys.readouterr()
        assert max(map(len, told(store, capsys).splitlines())) <= 80


def test_json_is_all_of_it_and_nothing_else(tmp_path, capsys):
    store = build_store(tmp_path / "s").path
    assert main(["info", str(store), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["complete"], summary["samples"]["count"], summary["layout"]["layer_ids"]) == (True, 7, [2, -1, 5])


def test_a_growing_store_tells_which_shards_are_missing(tmp_path, capsys):
    store = build_store(tmp_path / "s", lengths=(5,) * 30, without_shards=(0, 1, 2, 6)).path
    said = entries(told(store, capsys))
    assert said["shards"] == "6 of 10 have states, up to 3 samples each"
    assert said["missing"] == "4 shards: 0-2, 6"
    assert said["done"].startswith("60.0% of the tokens; about ")


def test_many_holes_are_cut_short(tmp_path, capsys):
    store = build_store(tmp_path / "s", lengths=(1,) * 60, without_shards=range(0, 20, 2)).path
    said = entries(told(store, capsys))
    assert said["missing"] == "10 shards: 0, 2, 4, 6, 8, 10, 12, 14 and 2 more runs"


def test_an_interrupted_job_that_lacks_only_its_seal_says_what_to_do(folder, capsys):
    store = interrupted(arguments(folder / "target", folder / "chats.jsonl", folder / "unsealed"))
    capsys.readouterr()
    said = entries(told(store, capsys))
    assert said["missing"] == "no shard; run the precompute again with --resume to declare the store complete"


def test_a_store_in_its_token_phase_says_so(tmp_path, capsys):
    said = entries(told(build_store(tmp_path / "s", until="tokens", lengths=(20,) * 40).path, capsys))
    assert said["shards"] == "14 so far, of up to 3 samples; more may come"
    assert said["tokens"].startswith("about 800, about ")
    assert said["tokens"].endswith("lengths are those of 10 samples, of a few shards")


def test_a_blend_tells_the_share_of_each_source(folder, capsys):
    write_rows(folder / "words.jsonl", *[{"messages": CHAT}] * 3)
    blend = f"[0.5, {folder / 'chats.jsonl'}, 0.5, {folder / 'words.jsonl'}]"
    store = precompute(folder / "target", blend, folder / "blend")
    capsys.readouterr()
    text = told(store, capsys)
    assert "source    chats: " in text
    assert "source    words: " in text
    assert main(["info", str(store), "--json"]) == 0
    shares = json.loads(capsys.readouterr().out)["sources"]
    assert sum(share["token_share"] for share in shares) == pytest.approx(1)
    assert [share["name"] for share in shares] == ["chats", "words"]


def test_damage_is_one_warning_that_names_verify_and_exit_code_1(tmp_path, capsys):
    store = build_store(tmp_path / "s").path
    flip(store / "index/length/c.0", 2)
    text = told(store, capsys, code=1)
    said = entries(text)
    assert "index/length" in said["damaged"]
    assert f"dspark-store verify {store}".replace(" ", "") in said["damaged"].replace(" ", "")
    assert said["tokens"] == "unknown"
    assert "target_hidden_states" in text


def test_a_store_whose_root_is_damaged_is_one_line_and_exit_code_1(tmp_path, capsys):
    store = build_store(tmp_path / "s").path
    (store / "zarr.json").write_text("{")
    assert main(["info", str(store)]) == 1
    assert capsys.readouterr().err.startswith("error: object zarr.json")


def test_no_store_is_a_mistake(tmp_path, capsys):
    assert main(["info", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: manifest not found")


def test_a_terminal_shows_colours(tmp_path, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = parser.parse_args([str(build_store(tmp_path / "s").path)])
    for variable, coloured in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", variable)
        terminal = Terminal()
        run_command(given, terminal)
        assert ("\x1b[32m" in terminal.getvalue()) == coloured


@pytest.mark.parametrize(("share", "shown"), [(0, ""), (0.001, "▏"), (0.5, "██"), (0.53, "██▏"), (1, "████")])
def test_a_bar_fills_its_share(share, shown):
    assert bar(share, 4) == shown
