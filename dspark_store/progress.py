"""Progress of long work. It is shown by whatever a command has set with `progress_shown_by`; by default by nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, Self


class Progress(AbstractContextManager["Progress", None], Protocol):
    """How far some work is; a context manager over that work."""

    def advance(self, units: int, note: str = "") -> None:
        """Count ``units`` more as done, and show ``note`` beside them."""

    def reach(self, units: int, note: Callable[[], str]) -> None:
        """Show that ``units`` are done in all, and ``note`` beside them, at most a few times per second."""


class Unseen:
    """Progress that nobody sees."""

    def __init__(self, what: str = "", total: int = 0, unit: str = "", done: int = 0) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def advance(self, units: int, note: str = "") -> None:
        """Do nothing."""

    def reach(self, units: int, note: Callable[[], str]) -> None:
        """Do nothing."""


type ShowProgress = Callable[[str, int, str, int], Progress]
"""Shows work by its name, units in all, name of a unit, and units that were done before."""

_show: ShowProgress = Unseen


def start_progress(what: str, total: int, unit: str, done: int = 0) -> Progress:
    """Return the progress of work of ``total`` units, of which ``done`` were done before."""
    return _show(what, total, unit, done)


@contextmanager
def progress_shown_by(show: ShowProgress) -> Iterator[None]:
    """Have all work in the block show its progress, in every thread."""
    global _show  # noqa: PLW0603 # one process has one terminal
    before, _show = _show, show
    try:
        yield
    finally:
        _show = before
