"""What commands and their settings are made of: one line about a mistaken argument, with the nearest known word."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any, NoReturn


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that raises ValueError where argparse prints the usage and exits; so do its subparsers.

    It takes no abbreviations: a word that is nearly a flag is a mistake.
    """

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - argparse's
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise ValueError with ``message``."""
        raise ValueError(f"{message} (see --help)")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word that is most like ``word``; there must be one."""
    return difflib.get_close_matches(word, sorted(known), 1, cutoff=0.0)[0]


def flag(name: str) -> str:
    """Return how a setting is written on the command line, without the two dashes before it."""
    return name.replace("_", "-")


def setting(help: str, default: Any = dataclasses.MISSING, **options: Any) -> Any:  # noqa: A002, ANN401 - argparse's name; a field's default
    """Make the field of a settings dataclass that a flag or a file sets; ``options`` are argparse's."""
    return dataclasses.field(default=default, metadata={"help": help, **options})
