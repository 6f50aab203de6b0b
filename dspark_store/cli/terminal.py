"""What commands print on a terminal: colours, lines that fit, tokens and what of them is supervised, and a bar."""

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
from tqdm import tqdm

from dspark_store.text import visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

type Colour = Literal["red", "green", "yellow", "bold"]
type Decode = Callable[[Sequence[int]], str]
"""Turns token ids into text."""

_CODES: dict[Colour, str] = {"red": "31", "green": "32", "yellow": "33", "bold": "1"}
MARKS = ("⟦", "⟧")
MARKS_NOTE = f"supervised tokens stand in {MARKS[0]}{MARKS[1]}"
_WIDEST = 100
_NOTE_SECONDS = 0.2


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


class Bar:
    """A bar over ``total`` units of work; on a terminal it redraws, in a log it prints a line now and then."""

    def __init__(self, what: str, total: int, unit: str, done: int = 0) -> None:
        terminal = sys.stderr.isatty()
        self._noted = 0.0
        self._bar = tqdm(
            total=total,
            initial=done,
            desc=what,
            unit=f" {unit}",
            unit_scale=True,
            file=sys.stderr,
            mininterval=0.2 if terminal else 20.0,
            dynamic_ncols=terminal,
        )

    def advance(self, units: int, note: str = "") -> None:
        """Count ``units`` more as done, and show ``note`` behind the bar."""
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(units)

    def reach(self, units: int, note: Callable[[], str]) -> None:
        """Show that ``units`` are done in all, and ``note`` behind the bar, a few times a second."""
        if time.monotonic() - self._noted >= _NOTE_SECONDS:
            self._noted = time.monotonic()
            self._bar.set_postfix_str(note(), refresh=False)
        self._bar.update(units - self._bar.n)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._bar.close()
