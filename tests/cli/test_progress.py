"""What a bar shows, in words that people read."""

import time

import pytest

from dspark_store.cli.progress import Bar
from dspark_store.text import size_text, time_text


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
