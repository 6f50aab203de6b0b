"""What a terminal would obey is shown, and not obeyed, wherever it comes from."""

import ast
import json
import logging
from pathlib import Path

import pytest

from dspark_store.cli.main import main
from dspark_store.text import log_to_stderr, say, say_error, say_json, show, size_text, time_text, visible
from tests.stores import build_store

PACKAGE = Path(__file__).parents[1] / "dspark_store"
HIDDEN = {
    "\x1b[2J": "\\x1b[2J",
    "\x07": "\\x07",
    "\x7f": "\\x7f",
    "\x9b31m": "\\x9b31m",
    "\r": "\\x0d",
    "\u202e": "\\u202e",
    "\u2066": "\\u2066",
    "\u200f": "\\u200f",
    "\u2028": "\\u2028",
    "\u200b": "\\u200b",
    "\ufeff": "\\ufeff",
    "\U000e0041": "\\U000e0041",
    "\ud800": "\\ud800",
}
NASTY = "".join(HIDDEN).replace("\ud800", "")
FORBIDDEN = set(NASTY) - set("[2J31m")


@pytest.mark.parametrize("text", HIDDEN)
def test_what_cannot_be_seen_is_written_out(text):
    assert visible(f"a{text}b") == f"a{HIDDEN[text]}b"


def test_text_of_any_script_stays_as_it_is():
    for text in ("plain", "Grüße, мир, 世界", "👩\u200d🚀", "क\u200dष", "two\nlines\tand a tab", "\xa0"):
        assert visible(text) == text


def test_a_line_stays_one_line(capsys):
    say("one\nforged", "two")
    assert capsys.readouterr().out == "one\\x0aforged\ntwo\n"


def test_only_the_colours_of_commands_are_kept(capsys):
    show("\x1b[31mred\x1b[0m \x1b[8mhidden\x1b]0;title\x07")
    assert capsys.readouterr().out == "\x1b[31mred\x1b[0m \\x1b[8mhidden\\x1b]0;title\\x07\n"


def test_json_says_the_same_in_escapes(capsys):
    value = {"a": f"{NASTY}é", "b": [1, None]}
    say_json(value)
    out = capsys.readouterr().out
    assert json.loads(out) == value
    assert not FORBIDDEN & set(out)
    assert "é" in out


def test_errors_and_logs_go_the_same_way(capsys, monkeypatch):
    say_error("a\nb\x1b[2J")
    assert capsys.readouterr().err == "error: a b\\x1b[2J\n"
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log_to_stderr("WARNING")
    logging.getLogger("any").warning("host %s", "\u202ex")
    assert capsys.readouterr().err == "WARNING host \\u202ex\n"


def calls(module: Path) -> set[str]:
    """Return what a module calls that writes to a terminal."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Call):
            text = ast.unparse(node.func)
            if text in ("print", "pprint", "sys.stdout.write", "sys.stderr.write", "logging.basicConfig"):
                found.add(text)
    return found


def test_nothing_else_prints():
    modules = [path for path in PACKAGE.rglob("*.py") if path.name != "text.py"]
    modules += [path for room in ("readers", "writers") for path in (PACKAGE / room).rglob("*.py")]
    assert len(modules) > 100
    assert {str(path): found for path in modules if (found := calls(path))} == {}


@pytest.mark.parametrize(
    "words",
    [["info"], ["info", "--json"], ["head", "-n", "1"], ["verify"], ["verify", "--json"], ["repair"], ["stats"]],
)
def test_no_field_of_a_store_gives_orders(words, tmp_path, capsys):
    manifest = {
        **{name: f"{name}{NASTY}" for name in ("target_model_type", "train_data_path", "train_split", "shuffle_seed")},
        "source": {"type": NASTY, "content_sha256": NASTY},
        "pad_token_id": 5,
    }
    fields = {
        "store_id": NASTY,
        "manifest": manifest,
        "target_config": {NASTY: NASTY, "num_attention_heads": NASTY},
        "producers": ({"host": NASTY, "device": NASTY, "equality_class": NASTY},),
    }
    store = build_store(tmp_path / "store", fields=fields, sources=(f"a{NASTY}", "b")).path
    lock = {"host": NASTY, "space": NASTY, "pid": 1, "started": NASTY, "taken": 0}
    (store / ".writer.lock").write_text(json.dumps(lock))
    (store / f"stray{NASTY}").write_text("")
    (store / "input_ids" / f"c.{NASTY}").write_text("")
    (store / "input_ids" / "c.1.0").write_bytes((store / "input_ids" / "c.0.0").read_bytes())
    more = ["--output", str(tmp_path / "stats")] if words[0] == "stats" else []
    assert main([*words, str(store), *more]) in (0, 1, 2)
    told = capsys.readouterr()
    assert not FORBIDDEN & set(told.out)
    assert not (FORBIDDEN - {"\r"}) & set(told.err)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 KB"),
        (999_499, "999.50 KB"),
        (999_500, "1.00 MB"),
        (1.5e12, "1.50 TB"),
        (3e18, "3000.00 PB"),
        (-2e6, "-2.00 MB"),
    ],
)
def test_sizes_are_in_powers_of_1000(count, text):
    assert size_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (89, "89 s"), (90, "2 min"), (5399, "90 min"), (5400, "1.5 h")]
)
def test_durations_are_in_the_unit_that_fits(seconds, text):
    assert time_text(seconds) == text
