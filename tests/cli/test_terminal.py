"""What commands print on a terminal, and what where there is none."""

import io
import time

import numpy as np
import pytest

from dspark_store.cli.terminal import Bar, Colours, columns, entry, masked_text
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


def test_a_bar_shows_what_is_done_and_the_note(capsys):
    with Bar("capture", 100, "tokens", done=20) as progress:
        progress.reach(60, lambda: "noted")
        progress.advance(40, "all done")
    shown = capsys.readouterr().err
    assert "capture:" in shown
    assert "100/100" in shown
    assert "all done" in shown


def test_a_note_is_made_a_few_times_a_second_and_not_for_every_unit(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    noted: list[int] = []
    progress = Bar("capture", 10, "tokens")
    for units in range(1, 5):

        def note(units: int = units) -> str:
            noted.append(units)
            return "a note"

        progress.reach(units, note)
        now[0] += 0.15
    progress._bar.close()
    assert noted == [1, 3]
