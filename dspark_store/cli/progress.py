"""Progress of long work as a bar on standard error: share done, rate, time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tqdm import tqdm

_NOTE_SECONDS = 0.2


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
