"""What commands print on a terminal, and what where there is none."""

import io
import re
import time

import numpy as np
import pytest

from dspark_store.cli.terminal import Bar, Colours, columns, entry, masked_text, rate_text, show_progress
from dspark_store.text import visible


class Terminal(io.StringIO):
    def isatty(self):
        return True


def text_of(ids):
    return "".join(chr(number) for number in ids)


@pytest.mark.parametrize(
    ("out", "variable", "shown"),
    [(Terminal(), "", True), (Terminal(), "1", False), (io.StringIO(), "", False)],
)
def test_colours_are_for_terminals_unless_no_color_is_set(out, variable, shown, monkeypatch):
    monkeypatch.setenv("NO_COLOR", variable)
    assert (Colours(out).paint("text", "red") == "text") == (not shown)


def test_supervised_text_is_green_or_marked(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    ids, mask = np.array([97, 98, 99, 100]), np.array([0, 1, 1, 0])
    assert masked_text(ids, mask, text_of, Colours(Terminal())) == "a\x1b[32mbc\x1b[0md"
    assert masked_text(ids, mask, text_of, Colours(io.StringIO())) == "a⟦bc⟧d"
    assert masked_text(ids[:0], mask[:0], text_of, Colours(io.StringIO())) == ""


def test_what_a_terminal_would_obey_is_shown_instead():
    assert visible("a\x1b[2Jb\x07\r\n\tc\x9b") == "a\\x1b[2Jb\\x07\\x0d\n\tc\\x9b"


def test_an_entry_fits_and_says_everything():
    path = "/a/very/long/path" * 20
    lines = entry("store", f"{path}, complete", width=60)
    assert max(map(len, lines)) <= 60
    assert "".join(line[10:] for line in lines).replace(" ", "") == f"{path},complete"
    assert [line[:10].strip() for line in lines] == ["store"] + [""] * (len(lines) - 1)


def test_a_line_is_as_wide_as_the_terminal_up_to_100_columns(monkeypatch):
    for found, wide in (("64", 64), ("300", 100)):
        monkeypatch.setenv("COLUMNS", found)
        assert columns() == wide


@pytest.fixture
def clock(monkeypatch):
    """Time as a list of one number, which a test sets."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_bar_is_for_a_terminal_and_shows_what_is_done_and_the_note(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with show_progress("capture", 100, "tokens", done=20) as progress:
        progress.reach(60, lambda: "noted")
        progress.advance(40)
    assert "capture:" in terminal.getvalue()
    assert "100/100" in terminal.getvalue()
    assert " tokens/s, noted]" in terminal.getvalue()


def test_a_file_gets_lines_at_each_5_percent_or_30_seconds_and_at_the_end(clock, capsys):
    with show_progress("capture", 1000, "tokens", done=100) as progress:
        for seconds, units in ((0.5, 200), (1.5, 240), (2.5, 289), (20, 290), (51, 300), (52, 310), (60, 1000)):
            clock[0] = 1000 + seconds
            progress.reach(units, lambda: "noted")
    shown = capsys.readouterr().err
    assert "\r" not in shown
    assert [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", line) for line in shown.splitlines()] == [
        "capture: 24% (240 of 1,000 tokens), 93 tokens/s, 8 s left; noted",
        "capture: 29% (290 of 1,000 tokens), 9.5 tokens/s, 75 s left; noted",
        "capture: 30% (300 of 1,000 tokens), 3.9 tokens/s, 3 min left; noted",
        "capture: 100% (1,000 of 1,000 tokens), 15 tokens/s, in 60 s; noted",
    ]


def test_work_that_ends_in_a_moment_is_one_line_and_none_where_nothing_is_done(capsys):
    with show_progress("verify", 3, "shards") as progress:
        for _ in range(3):
            progress.advance(1)
    (line,) = capsys.readouterr().err.splitlines()
    assert " verify: 100% (3 of 3 shards), " in line
    with show_progress("verify", 3, "shards", done=3):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("rate", "unit", "text"),
    [
        (1 / 9.6, "steps", "9.6 s per step"),
        (4.25, "steps", "4.2 steps/s"),
        (12_345.6, "tokens", "12,346 tokens/s"),
        (2.5e9, "B", "2.50 GB/s"),
        (0, "rows", "0.0 rows/s"),
    ],
)
def test_a_rate_reads_well(rate, unit, text):
    assert rate_text(rate, unit) == text


def test_a_note_is_made_a_few_times_a_second_and_not_for_every_unit(clock):
    noted: list[int] = []
    progress = Bar("capture", 10, "tokens")
    for units in range(1, 5):

        def note(units: int = units) -> str:
            noted.append(units)
            return "a note"

        progress.reach(units, note)
        clock[0] += 0.15
    progress._bar.close()
    assert noted == [1, 3]
