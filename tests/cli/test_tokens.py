"""``dspark-store tokens``: samples as they will be, and a report of the whole source."""

import argparse
import io

import pytest
from transformers import LlamaConfig

from dspark_store.cli.main import main
from dspark_store.cli.tokens import add_arguments
from dspark_store.cli.tokens import run as run_command
from tests.sources.words import CHAT, write_rows
from tests.tiny import VOCAB_SIZE, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preview")
    tiny_tokenizer().save_pretrained(folder / "it")
    write_rows(
        folder / "chats.jsonl", *({"messages": [*CHAT[:2], {"role": "user", "content": "x" * n}]} for n in range(6))
    )
    write_rows(folder / "bad.jsonl", {"messages": CHAT}, {}, {"messages": []}, {"messages": CHAT})
    return folder


def run(folder, *arguments, name="chats.jsonl"):
    return main(["tokens", str(folder / name), "--tokenizer", str(folder / "it"), *arguments])


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_first_samples_are_shown_decoded_with_their_counts(folder, capsys):
    assert run(folder) == 0
    shown = capsys.readouterr().out
    assert f"row 0 ({folder / 'chats.jsonl'}, line 1): 19 tokens, 6 supervised\n" in shown
    assert "<|user|>hi there<|end|><|assistant|>⟦yo ok<|end|>⟧<|user|>xx<|end|>\n" in shown
    assert shown.startswith("supervised tokens stand in ⟦⟧\n\nrow 0 ")
    assert "row 2 " in shown
    assert "row 3 " not in shown
    assert "\x1b" not in shown


def test_chosen_rows_are_those_after_the_shuffle(folder, capsys):
    assert run(folder, "--rows", "5", "0", "--shuffle-seed", "1", "--seq-length", "17") == 0
    shown = capsys.readouterr().out
    assert shown.index("row 5 ") < shown.index("row 0 ")
    assert "17 tokens" in shown
    assert run(folder, "--rows", "6") == 2
    assert "error: row 6 is not there; there are 6 rows" in capsys.readouterr().err


def test_a_terminal_shows_what_is_supervised_in_colour(folder):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    terminal = Terminal()
    model = str(folder / "it")
    run_command(parser.parse_args([str(folder / "chats.jsonl"), "--target-model", model, "--rows", "1"]), terminal)
    assert "<|assistant|>\x1b[32myo ok<|end|>\x1b[0m<|user|>x<|end|>" in terminal.getvalue()


def test_the_report_counts_every_row(folder, capsys):
    assert run(folder, "--report", "--seq-length", "19") == 0
    total, _, *facts = capsys.readouterr().out.splitlines()
    assert total == "6 samples of 6 records, 114 tokens, 36 supervised"
    lines = dict(line.rsplit(maxsplit=1) for line in facts)
    assert (lines["rows read"], lines["samples"], lines["truncated"], lines["refused"]) == ("6", "6", "5", "0")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [([], 2), (["--on-bad-row", "skip"], 2), (["--on-bad-row", "skip", "--max-refused", "0.5"], 0)],
)
def test_the_report_tells_all_that_is_refused_and_then_whether_it_is_too_much(folder, capsys, arguments, code):
    assert run(folder, "--report", *arguments, name="bad.jsonl") == code
    printed = capsys.readouterr()
    assert "bad.jsonl, line 2: the row has neither messages nor conversations" in printed.out
    assert "bad.jsonl, line 3: messages must be a list" in printed.out
    assert ("2 of 4 rows cannot be used, more than" in printed.err) == (code == 2)


def test_any_source_can_be_shown_and_a_blend_reports_its_parts(folder, capsys):
    assert main(["tokens", "{type: dummy, samples: 2, max_length: 4}", "--tokenizer", str(folder / "it")]) == 0
    assert "row 1: " in capsys.readouterr().out
    chats = str(folder / "chats.jsonl")
    assert main(["tokens", "0.5", chats, "0.5", chats, "--report", "--tokenizer", str(folder / "it")]) == 0
    shown = capsys.readouterr().out
    assert "12 samples of 12 records" in shown
    assert shown.count("\nrows read ") == 2
    for name in ("chats", "chats 2"):
        assert f"\npart {name}: 6 samples, 129 tokens, 36 supervised\n" in shown
        assert f"\n\npart {name}\nrows read " in shown
    assert main(["tokens", "{type: dummy", "--tokenizer", str(folder / "it")]) == 2
    assert "is not YAML" in capsys.readouterr().err


def test_a_sample_of_a_blend_is_told_by_its_part_and_its_place_there(folder, capsys):
    chats, it = str(folder / "chats.jsonl"), str(folder / "it")
    blend = f"[{{source: [{chats}, {{type: dummy, samples: 6, max_length: 4}}], name: inner}}]"
    assert main(["tokens", blend, "--tokenizer", it, "--rows", "0", "1", "2"]) == 0
    shown = capsys.readouterr().out
    assert f"row 0 (part inner, part chats, {chats}, line 1): 19 tokens" in shown
    assert "row 1 (part inner, part dummy): " in shown
    assert f"row 2 (part inner, part chats, {chats}, line 2): 20 tokens" in shown


def test_the_report_of_a_blend_tells_what_is_repeated_and_left_out(folder, capsys):
    chats, it = str(folder / "chats.jsonl"), str(folder / "it")
    blend = (
        "{type: blend, schedule: hyper_parallel, samples: 6, "
        f"sources: [3, {{type: dummy, samples: 2, max_length: 4}}, 3, {chats}]}}"
    )
    assert main(["tokens", blend, "--tokenizer", it, "--report"]) == 0
    shown = capsys.readouterr().out
    assert "part 'dummy' has 2 records: 3 taken, 1 of them again, 0 left out\n" in shown
    assert "part 'chats' has 6 records: 3 taken, 0 of them again, 3 left out\n" in shown


def test_ids_may_be_any_that_the_target_knows_or_else_its_tokenizer(folder, capsys):
    write_rows(folder / "ids.jsonl", {"input_ids": [VOCAB_SIZE - 1]})
    assert len(tiny_tokenizer()) < VOCAB_SIZE
    assert run(folder, name="ids.jsonl") == 2
    assert "expected 0 to 262" in capsys.readouterr().err
    target = folder / "target"
    tiny_tokenizer().save_pretrained(target)
    LlamaConfig(vocab_size=VOCAB_SIZE).save_pretrained(target)
    assert main(["tokens", str(folder / "ids.jsonl"), "--target-model", str(target)]) == 0
    assert "1 tokens" in capsys.readouterr().out


def test_several_files_are_one_source(folder, capsys):
    chats = str(folder / "chats.jsonl")
    assert main(["tokens", chats, chats, "--report", "--tokenizer", str(folder / "it")]) == 0
    assert "12 samples of 12 records" in capsys.readouterr().out
