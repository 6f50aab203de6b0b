"""Progress of long jobs on standard error: share done, rate, time left, size to come."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tqdm import tqdm

_NOTE_SECONDS = 0.2
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def size_text(count: float) -> str:
    """Return bytes as people read them, in powers of 1000."""
    power = 0
    while abs(count) >= 999.5 and power < len(_UNITS) - 1:
        count /= 1000
        power += 1
    return f"{count:.0f} {_UNITS[power]}" if power == 0 else f"{count:.2f} {_UNITS[power]}"


def time_text(seconds: float) -> str:
    """Return a duration as people read it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


class Progress:
    """A bar over ``total`` units of work; on a terminal it redraws, in a log it prints a line now and then.

    ``hidden`` counts and shows nothing: for all but one of several ranks that would show the same.
    """

    def __init__(self, what: str, total: int, unit: str, done: int = 0, *, hidden: bool = False) -> None:
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
            disable=hidden,
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
