"""What the arguments of every command are made of."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn

from dspark_store.settings import OWN_METADATA, flag, kind_of


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that raises ValueError where argparse prints the usage and exits; so do its subparsers.

    It takes no abbreviations: a word that is nearly a flag is a mistake.
    """

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - argparse's
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise ValueError with ``message``."""
        raise ValueError(f"{message} (see --help)")


def add_settings(parser: argparse.ArgumentParser, known: Mapping[str, dataclasses.Field[Any]]) -> None:
    """Add a flag for each setting, None where it is not given, in the groups that the settings name."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, setting in known.items():
        title = setting.metadata.get("group", "")
        if title and title not in groups:
            groups[title] = parser.add_argument_group(title)
        options = {key: value for key, value in setting.metadata.items() if key not in OWN_METADATA}
        if isinstance(setting.default, bool):
            options["action"] = "store_true"
        else:
            options["type"] = kind_of(setting)
        text = setting.metadata["help"]
        if not isinstance(setting.default, bool) and setting.default not in (dataclasses.MISSING, None, "", ()):
            text += f" (default: {setting.default})"
        groups.get(title, parser).add_argument(f"--{flag(name)}", default=None, help=text, **options)
