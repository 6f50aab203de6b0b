"""``dspark-store head``."""

import pytest

from dspark_store.cli.main import main
from tests.precompute.jobs import precompute
from tests.stores import build_store, flip
from tests.tiny import save_target_dir, tiny_qwen3, write_chats


def told(store, capsys, *more, code=0):
    capsys.readouterr()
    assert main(["head", str(store), *more]) == code
    return capsys.readouterr().out


def rows_of(shown):
    """Return the layers that the tables of norms have."""
    return [line[:6].strip() for line in shown.splitlines() if len(line.split()) == 7 and line.split()[-1].isdigit()]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("head")
    save_target_dir(folder / "target", tiny_qwen3())
    write_chats(folder / "chats.jsonl", 6)
    return precompute(folder / "target", folder / "chats.jsonl", folder / "store")


def test_the_first_samples_are_shown_as_text_with_marks_and_norms(job, capsys):
    shown = told(job, capsys)
    assert shown.count("\nsample ") == 3
    assert "<|assistant|>⟦" in shown
    assert shown.count(" layer   mean norm") == 3
    assert shown.count("  last ") == 3


def test_chosen_samples_and_layers(job, capsys):
    shown = told(job, capsys, "--samples", "5", "1", "--layers", "1")
    assert shown.index("sample 5:") < shown.index("sample 1:")
    assert rows_of(shown) == ["1", "last"] * 2
    assert rows_of(told(job, capsys, "-n", "1", "--layers")) == rows_of(told(job, capsys, "-n", "1"))


def test_long_samples_are_cut_short_and_states_left_out(job, capsys):
    shown = told(job, capsys, "-n", "1", "--tokens", "5", "--text-only")
    assert " tokens more\n" in shown
    assert "mean norm" not in shown
    assert " tokens more" not in told(job, capsys, "-n", "1", "--tokens", "0")


def test_without_a_tokenizer_ids_are_shown(tmp_path, capsys):
    shown = told(build_store(tmp_path / "s").path, capsys, "--samples", "2")
    assert "note      the store names no target; give its tokenizer with --tokenizer\n" in shown
    assert "⟦62 ⟧69 ⟦76 83 ⟧90 ⟦97 104 ⟧\n" in shown


def test_samples_without_states_say_so(tmp_path, capsys):
    shown = told(build_store(tmp_path / "s", without_shards=(1,)).path, capsys, "--samples", "0", "3", "6")
    first, second, third = shown.split("\nsample ")[1:]
    assert "mean norm" in first
    assert "mean norm" in third
    assert "its states are not there yet" in second


def test_a_store_in_its_token_phase_has_samples_too(tmp_path, capsys):
    assert "sample 1: 20 tokens" in told(build_store(tmp_path / "s", until="tokens").path, capsys)
    assert "no samples so far\n" in told(build_store(tmp_path / "none", until="tokens", lengths=()).path, capsys)


def test_a_sample_that_is_not_finite_is_marked(tmp_path, capsys):
    shown = told(build_store(tmp_path / "s", spoiled=1).path, capsys, "-n", "2")
    assert "sample 0: 1 tokens, 0 supervised\n" in shown
    assert "sample 1: 20 tokens, 14 supervised, NOT FINITE\n" in shown
    assert [line.split()[-1] for line in shown.splitlines() if line.startswith("     2 ")] == ["0", "1"]


def test_damage_is_told_at_its_sample_and_the_others_are_shown(tmp_path, capsys):
    store = build_store(tmp_path / "s").path
    flip(store / "target_hidden_states/c.1.0.0", 10)
    shown = told(store, capsys, "--samples", "0", "3", "6", code=1)
    assert shown.count("damaged") == 1
    assert shown.count("mean norm") == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--samples", "7"], "sample 7 is not in the store"),
        (["--layers", "4"], "layer 4 was not captured"),
        (["-n", "-1"], "must not be negative"),
        (["--tokenizer", "/gone"], "there is no such directory"),
        (["-n", "1", "--samples", "1"], "not allowed with argument"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_shown(tmp_path, capsys, more, message):
    assert main(["head", str(build_store(tmp_path / "s").path), *more]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""
