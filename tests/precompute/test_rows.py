"""What a user is told of the tokens before the target is loaded: what is cut, not supervised, or left out."""

import logging

import pytest

from dspark_store.format.ledger import token_ledger
from dspark_store.format.metadata import read_record
from dspark_store.format.storage import LocalStorage
from dspark_store.precompute import tokenise as tokenise_module
from dspark_store.precompute.__main__ import main
from dspark_store.precompute.tokenise import SampleCounts
from tests.precompute.jobs import interrupted, refused, sharded_module, write_rows

QUESTION = {"messages": [{"role": "user", "content": "nobody answers"}]}
ORDERED = ("--shuffle-seed", "none", "--seq-length", 32)
FULL, LONG = "x" * 24, "x" * 40  # a chat of one question has 8 tokens beside its answer


@pytest.fixture
def rows(tmp_path):
    """One of these chats fills 32 tokens, two are longer, and two have no answer."""
    return write_rows(tmp_path / "rows.jsonl", [LONG, "one", FULL, QUESTION, "two", LONG, "three", QUESTION])


def told(capsys):
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tokens   ")]
    return line


def test_what_is_cut_and_not_supervised_is_told_before_the_target_is_loaded(job, rows, capsys, monkeypatch):
    before_loading = []

    def load(*args, **options):
        before_loading.append(told(capsys))
        raise KeyboardInterrupt

    monkeypatch.setattr(sharded_module, "load_target", load)
    assert main(job(*ORDERED, data=rows)) == 130
    assert before_loading == [
        "tokens   8 samples: 2 (25.0%) cut at seq-length 32, 2 (25.0%) without a supervised token"
    ]


@pytest.mark.usefixtures("no_target")
def test_an_estimate_tells_the_same(job, rows, capsys):
    assert main(job(*ORDERED, "--estimate", data=rows)) == 0
    printed = capsys.readouterr().out
    assert "cut at seq-length  2 (25.0%)\n" in printed
    assert "unsupervised       2 (25.0%)\n" in printed


@pytest.mark.parametrize(
    ("kept", "cut"), [((), "2 (25.0%)"), ((0,), "1 to 3 (12.5% to 37.5%)"), ((0, 1), "0 to 3 (0.0% to 37.5%)")]
)
def test_a_resume_says_between_which_numbers_those_cut_before_lie(job, rows, capsys, kept, cut):
    output = interrupted(job(*ORDERED, data=rows), tokenise_module, "settle_tokens")
    for shard in {0, 1}.difference(kept):
        token_ledger(LocalStorage(output)).retract(shard)
    capsys.readouterr()
    assert main(job(*ORDERED, "--resume", data=rows)) == 0
    assert told(capsys) == f"tokens   8 samples: {cut} cut at seq-length 32, 2 (25.0%) without a supervised token"


def test_pieces_that_fill_the_length_are_not_cut(job, rows, capsys):
    flags = (*ORDERED, "--over-long", "split")
    interrupted(job(*flags, data=rows))
    assert main(job(*flags, "--resume", data=rows)) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tokens")]
    assert [line.split(": ")[1].split(" cut")[0] for line in lines] == ["0 (0.0%)", "0 (0.0%)"]


@pytest.mark.usefixtures("no_target")
@pytest.mark.parametrize("flags", [(), ("--estimate",)])
def test_samples_of_which_none_is_supervised_are_an_error_and_nothing_is_left(job, tmp_path, capsys, flags):
    data = write_rows(tmp_path / "rows.jsonl", [QUESTION] * 5)
    line = refused(job(*flags, data=data), capsys)
    assert "none of the 5 samples has a supervised token" in line
    assert list(tmp_path.iterdir()) == [data]


@pytest.mark.usefixtures("no_target")
def test_nothing_is_left_when_a_resume_finds_that_none_is_supervised(job, tmp_path, capsys):
    data = write_rows(tmp_path / "rows.jsonl", [QUESTION] * 5)
    output = interrupted(job(data=data), tokenise_module, "settle_tokens")
    assert read_record(LocalStorage(output)).phase == "tokens"
    assert "none of the 5 samples has a supervised token" in refused(job("--resume", data=data), capsys)
    assert list(output.iterdir()) == []


def test_a_smoke_test_of_rows_without_an_answer_says_nothing_about_the_rest(job, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", [QUESTION, QUESTION, "one"])
    assert main(job("--smoke", 2, "--shuffle-seed", "none", data=data)) == 0


@pytest.mark.parametrize(("unsupervised", "warned"), [(2, 0), (3, 1)])
def test_a_warning_tells_when_most_samples_are_not_supervised(caplog, unsupervised, warned):
    with caplog.at_level(logging.WARNING):
        SampleCounts(4, 32, 0, 0, unsupervised).check()
    assert caplog.text.count(f"most samples, {unsupervised} (75.0%) of 4, have no supervised token") == warned


@pytest.mark.usefixtures("no_target")
@pytest.mark.parametrize("command", [(), ("--estimate",)])
@pytest.mark.parametrize(
    ("flags", "reasons"),
    [
        (("--over-long", "drop"), "of 3 rows read, 3 are longer than seq-length and dropped"),
        (("--min-supervised", 10), "of 3 rows read, 3 have fewer supervised tokens than min-supervised"),
    ],
)
def test_a_source_whose_filters_leave_nothing_says_why(job, tmp_path, capsys, flags, reasons, command):
    data = write_rows(tmp_path / "rows.jsonl", ["x" * 9] * 3)
    line = refused(job("--seq-length", 15, *flags, *command, data=data), capsys)
    assert line == f"error: the source has no samples: {reasons}"
    assert list(tmp_path.iterdir()) == [data]


@pytest.mark.usefixtures("no_target")
def test_each_part_of_a_blend_that_gives_nothing_says_why(job, tmp_path, capsys):
    data = write_rows(tmp_path / "rows.jsonl", ["x", {"text": "?"}])
    blend = f"[{{source: {{type: chat, path: {data}, min_supervised: 9}}, name: few}}]"
    line = refused(job("--on-bad-row", "skip", "--max-refused", 0.5, "--input-data", blend), capsys)
    assert (
        "no samples: few: of 2 rows read, 1 have fewer supervised tokens than min-supervised, 1 cannot be used" in line
    )
    assert f"(1 such as {data}, line 2: the row has neither" in line
