"""Mistakes on the command line: one line each, from every command."""

import pytest

from dspark_store.cli.main import main
from dspark_store.cli.options import OneLineParser, leads
from dspark_store.settings import nearest


def test_a_mistake_is_an_error_of_one_line_in_subcommands_too():
    parser = OneLineParser()
    parser.add_subparsers(required=True, dest="command").add_parser("verify").add_argument("store")
    for words in ([], ["verify"], ["verify", "a", "b"], ["mend", "a"]):
        with pytest.raises(ValueError, match=r"\(see --help\)$") as refused:
            parser.parse_args(words)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("words", "named"), [(["verify"], "store"), ([], "command"), (["mend", "a"], "mend")])
def test_the_commands_end_with_exit_code_2_and_one_line(words, named, capsys):
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert named in line


def test_the_nearest_word_is_suggested_however_far_it_is():
    assert nearest("batchsize", ["seq_length", "batch_size"]) == "batch_size"
    assert nearest("?", ["seq_length"]) == "seq_length"


def test_rank_0_leads_and_so_does_a_process_alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert leads()
    monkeypatch.setenv("RANK", "0")
    assert leads()
    monkeypatch.setenv("RANK", "1")
    assert not leads()
