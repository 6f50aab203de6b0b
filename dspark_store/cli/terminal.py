"""What commands print on a terminal: colours, lines that fit, tokens and what of them is supervised, and progress."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, Self, TextIO

import numpy as np

from dspark_store.progress import Progress
from dspark_store.text import say, size_text, time_text, visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

type Colour = Literal["red", "green", "yellow", "bold"]
type Decode = Callable[[Sequence[int]], str]
"""Turns token ids into text."""

_CODES: dict[Colour, str] = {"red": "31", "green": "32", "yellow": "33", "bold": "1"}
MARKS = ("⟦", "⟧")
MARKS_NOTE = f"supervised tokens stand in {MARKS[0]}{MARKS[1]}"
_WIDEST = 100
_NOTE_SECONDS, _LINE_SECONDS, _LINE_SHARE = 0.2, 30.0, 0.05


class Colours:
    """Colours text for a stream: on a terminal only, and not where the environment has NO_COLOR (no-color.org)."""

    def __init__(self, out: TextIO) -> None:
        self.shown = out.isatty() and not os.environ.get("NO_COLOR")

    def paint(self, text: str, colour: Colour) -> str:
        """Return the text in a colour, or as it is, for `show` to print; what cannot be seen in it is made visible."""
        text = visible(text)
        return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if self.shown and text else text


def columns() -> int:
    """Return how wide a line may be: as the terminal is, 80 columns where there is none, but never over 100."""
    return min(_WIDEST, shutil.get_terminal_size((80, 24)).columns)


def entry(name: str, text: str, width: int, indent: int = 10) -> list[str]:
    """Return a name and what is to be said of it, as lines of at most ``width`` columns; nothing is left out."""
    lines = textwrap.wrap(visible(text), max(20, width - indent), break_on_hyphens=False) or [""]
    return [f"{name if number == 0 else '':<{indent}}{line}".rstrip() for number, line in enumerate(lines)]


def decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Return what decodes ids with a tokenizer, special tokens included."""
    return lambda ids: str(tokenizer.decode(list(ids)))


def masked_text(ids: np.ndarray, mask: np.ndarray, decode: Decode, colours: Colours) -> str:
    """Return the text of some tokens, (length,), what is supervised of it in green, or in `MARKS` without colours."""
    before, after = ("", "") if colours.shown else MARKS
    parts = []
    for start, stop in pairwise([0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]):
        text = visible(decode(ids[start:stop].tolist()))
        supervised = stop > start and bool(mask[start])
        parts.append(f"{before}{colours.paint(text, 'green')}{after}" if supervised else text)
    return "".join(parts)


def show_progress(what: str, total: int, unit: str, done: int = 0) -> Progress:
    """Show work of ``total`` units: by a bar on a terminal, by lines in a file or a pipe."""
    return (Bar if sys.stderr.isatty() else Lines)(what, total, unit, done)


def rate_text(rate: float, unit: str) -> str:
    """Return units per second as people read them, or seconds per unit where they are less than one."""
    if unit == "B":
        return f"{size_text(rate)}/s"
    if 0 < rate < 1:
        return f"{1 / rate:,.1f} s per {unit.removesuffix('s')}"
    return f"{rate:,.{0 if rate >= 10 else 1}f} {unit}/s"


class Lines:
    """Progress as lines: time, share, rate and time left, at each 5 % or 30 s, and at the end."""

    def __init__(self, what: str, total: int, unit: str, done: int = 0) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._before = self._done = self._told = done
        self._started = self._last = time.monotonic()
        self._note: Callable[[], str] = str

    def advance(self, units: int, note: str = "") -> None:
        """Count ``units`` more as done, and show ``note`` behind them."""
        self.reach(self._done + units, (lambda: note) if note else self._note)

    def reach(self, units: int, note: Callable[[], str]) -> None:
        """Show that ``units`` are done in all, and ``note`` behind them, where a line is due."""
        self._done, self._note = units, note
        waited, share = time.monotonic() - self._last, (units - self._told) / max(1, self._total)
        if waited >= _LINE_SECONDS or (waited >= 1 and share >= _LINE_SHARE):
            self._tell()

    def _tell(self) -> None:
        self._last, self._told = time.monotonic(), self._done
        seconds, new = self._last - self._started, self._done - self._before
        rate = new / max(seconds, 1e-3)
        left = f"{time_text((self._total - self._done) / rate)} left" if rate else "time left unknown"
        end = f"in {time_text(seconds)}" if self._done >= self._total else left
        done, total = (size_text(count) if self._unit == "B" else f"{count:,}" for count in (self._done, self._total))
        units = "" if self._unit == "B" else f" {self._unit}"
        told = (
            f"{self._done / max(1, self._total):.0%} ({done} of {total}{units}), {rate_text(rate, self._unit)}, {end}"
        )
        note = self._note()
        say(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self._what}: {told}{f'; {note}' if note else ''}", out=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._done != self._told:
            self._tell()


class Bar:
    """A bar over ``total`` units of work, for a terminal."""

    def __init__(self, what: str, total: int, unit: str, done: int = 0) -> None:
        from tqdm import tqdm  # which reads the environment that `main` sets, once

        self._unit, self._before, self._note = unit, done, ""
        self._started, self._noted = time.monotonic(), 0.0
        self._bar = tqdm(
            total=total,
            initial=done,
            desc=what,
            unit_scale=True,
            file=sys.stderr,
            mininterval=0.2,
            dynamic_ncols=True,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
        )

    def advance(self, units: int, note: str = "") -> None:
        """Count ``units`` more as done, and show ``note`` behind the bar."""
        self._note = note or self._note
        self.reach(int(self._bar.n) + units, lambda: self._note)

    def reach(self, units: int, note: Callable[[], str]) -> None:
        """Show that ``units`` are done in all, and ``note`` behind the bar, a few times a second."""
        now = time.monotonic()
        if now - self._noted >= _NOTE_SECONDS:
            self._noted = now
            rate = (units - self._before) / max(now - self._started, 1e-3)
            self._bar.set_postfix_str(", ".join(filter(None, (rate_text(rate, self._unit), note()))), refresh=False)
        self._bar.update(units - self._bar.n)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._bar.close()
