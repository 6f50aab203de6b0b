"""What commands share: their arguments, and their exit codes."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from dspark_store import __version__
from dspark_store.settings import OWN_METADATA, flag, kind_of, nearest

if TYPE_CHECKING:
    from dspark_store.inspection.shardwise import Workers

_GROUPS = ("data", "target", "store", "draft", "training", "answers", "ranks", "recovery", "advanced")
DAMAGED = DIFFERENT = 1
USER_ERROR, UNEXPECTED, INTERRUPTED, TERMINATED = 2, 3, 130, 143
EXIT_CODES = """\
exit codes:
  0    done, and all is well
  1    a store or checkpoint is not as it should be; of diff, the two stores differ; of evaluate, texts are not the
       target's own
  2    a mistake of the user's: a flag, a file, a setting, a full disk
  3    an unexpected error, such as a lack of memory; or another rank of the job has failed
  130  interrupted (SIGINT)
  143  terminated (SIGTERM)"""


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that raises ValueError where argparse prints the usage and exits; so do its subparsers.

    It takes no abbreviations: a word that is nearly a flag is a mistake, and the nearest flag or choice is named. Lists
    of whole numbers are given with spaces or commas between them. Its help ends with the exit codes.
    """

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - argparse's
        options = {"epilog": EXIT_CODES, "formatter_class": argparse.RawDescriptionHelpFormatter, **options}
        super().__init__(**options, allow_abbrev=False)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # -1,15 is a list and no flag
        self.add_argument("--version", action="version", version=f"dspark-store {__version__}")

    def parse_known_args(  # type: ignore[override] # of one kind of namespace
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse, and refuse the first flag that this parser does not have."""
        given, others = super().parse_known_args(args, namespace)
        unknown = next((word.partition("=")[0] for word in others if word.startswith("-")), "")
        if unknown:
            self.error(f"unknown flag {unknown}; the nearest is {nearest(unknown, self._option_string_actions)}")
        return given, others

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:  # noqa: ANN401 - argparse's
        if action.type is int and action.nargs in ("+", "*"):
            arg_strings = [part for word in arg_strings for part in word.split(",") if part] or arg_strings
        return super()._get_values(action, arg_strings)

    def _check_value(self, action: argparse.Action, value: Any) -> None:  # noqa: ANN401 - argparse's
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += f"; the nearest is {nearest(str(value), map(str, action.choices or ()))!r}"
            raise

    def error(self, message: str) -> NoReturn:
        """Raise ValueError with ``message``."""
        raise ValueError(f"{message} (see --help)")


def add_settings(parser: argparse.ArgumentParser, known: Mapping[str, dataclasses.Field[Any]]) -> None:
    """Add a flag for each setting, None where it is not given, in the groups that the settings name."""
    groups = {str(group.title): group for group in parser._action_groups}
    named = {setting.metadata["group"] for setting in known.values()} - {"", *groups}
    for title in sorted(named, key=_GROUPS.index):
        groups[title] = parser.add_argument_group(title)
    for name, setting in known.items():
        title = setting.metadata["group"]
        options = {key: value for key, value in setting.metadata.items() if key not in OWN_METADATA}
        if isinstance(setting.default, bool):
            options["action"] = "store_true"
        else:
            options["type"] = kind_of(setting)
        text = setting.metadata["help"]
        if not isinstance(setting.default, bool) and setting.default not in (dataclasses.MISSING, None, "", ()):
            text += f" (default: {setting.default})"
        (groups[title] if title else parser).add_argument(
            f"--{flag(name)}" if title else name, default=None, help=text, **options
        )


def setting_values(given: argparse.Namespace, known: Mapping[str, dataclasses.Field[Any]]) -> dict[str, Any]:
    """Return the settings that were given as flags."""
    return {name: value for name in known if (value := getattr(given, name)) is not None}


def add_worker_arguments(parser: argparse.ArgumentParser, do: str) -> None:
    """Add ``--threads`` and ``--scheduler``; ``do`` says what the workers do, as in "that read"."""
    parser.add_argument("--threads", type=int, help=f"threads {do}; by default one per core")
    parser.add_argument(
        "--scheduler",
        help=f"address of a dask scheduler (tcp://host:8786): workers of its cluster {do}, and see the same paths",
    )


def workers_of(given: argparse.Namespace) -> Workers:
    """Return the workers that were asked for; ValueError for fewer than one thread."""
    from dspark_store.inspection.shardwise import Workers

    if given.threads is not None and given.threads < 1:
        raise ValueError(f"--threads must be >= 1, got {given.threads}")
    return Workers(given.threads, given.scheduler)


def leads() -> bool:
    """Whether this process says what all ranks of a job would say alike; known before they have joined."""
    return os.environ.get("RANK", "0") == "0"


def exit_code_of(error: BaseException | None) -> int:
    """Return the exit code of an error: its own attribute ``exit_code``, or 2 for what a user can mend, else 3."""
    own: int | None = getattr(error, "exit_code", None)
    if own is not None:
        return own
    return USER_ERROR if isinstance(error, ValueError | OSError | ImportError) else UNEXPECTED
