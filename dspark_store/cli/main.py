"""``dspark-store``: the commands beside the main job."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from dspark_store.cli.options import OneLineParser
from dspark_store.cli.progress import Bar
from dspark_store.format.damage import DamagedStoreError
from dspark_store.progress import progress_shown_by
from dspark_store.text import say, say_error

DAMAGED, USER_ERROR, UNEXPECTED = 1, 2, 3
INTERRUPTED = 130


class Command(Protocol):
    """What a module of a command has."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the command."""
        ...

    def run(self, given: argparse.Namespace) -> int:
        """Run it; return the exit code. ValueError, OSError and ImportError are told in one line, with exit code 2."""
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """A command: the module that it is in, imported only when it is called, and what it does."""

    module: str
    purpose: str

    def load(self) -> Command:
        """Import the command."""
        return cast(Command, import_module(self.module))


MODULES = {
    "precompute": Entry("dspark_store.precompute.__main__", "run a target over a corpus"),
    "train": Entry("dspark_store.train", "train a draft from a store"),
    "evaluate": Entry("dspark_store.evaluate", "decode with a trained draft and its target"),
}
"""The programs that have arguments and exit codes of their own."""

COMMANDS = {
    "info": Entry("dspark_store.cli.info", "tell what a store is, how far it is and what it takes, on one screen"),
    "head": Entry("dspark_store.cli.head", "show samples of a store: their text, and the norms of their states"),
    "verify": Entry("dspark_store.cli.verify", "check every object of a store against its own promises"),
    "repair": Entry(
        "dspark_store.cli.repair", "put a damaged store right, or uncommit what a precompute must do again"
    ),
    "stats": Entry("dspark_store.cli.stats", "measure norms, channels, lengths and vocabulary of a store"),
    "estimate": Entry("dspark_store.cli.estimate", "tell how large a store will be, and how long it takes"),
    "diff": Entry("dspark_store.cli.diff", "compare two stores: identity, samples, states, weights"),
    "rechunk": Entry("dspark_store.cli.rechunk", "copy a store under other settings, verified"),
    "tokens": Entry("dspark_store.cli.tokens", "show what a target would be run over, or a report of it"),
    "plot": Entry("dspark_store.cli.plot", "draw how trainings went: loss, tokens a step, acceptance"),
    "generate": Entry("dspark_store.cli.generate", "let a target answer prompts: chats in its own words"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code: 0 good, 1 a store that is not as it should be, 2 a mistake, 3 a surprise.

    Each is told in one line.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words and words[0] in MODULES:
        module = import_module(MODULES[words[0]].module)
        return cast(int, module.main(words[1:]))
    try:
        given = _parser(words).parse_args(words)
        with progress_shown_by(Bar):
            return COMMANDS[given.command].load().run(given)
    except KeyboardInterrupt:
        say("interrupted", out=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output has seen enough
        sys.stderr.close()
        return 0
    except DamagedStoreError as error:
        return _tell(error, DAMAGED)
    except (ValueError, OSError, ImportError) as error:
        return _tell(error, USER_ERROR)
    except Exception as error:  # noqa: BLE001 # whatever it is, nobody is to take it for a verdict about a store
        return _tell(f"{type(error).__name__}: {error}", UNEXPECTED)


def _tell(error: object, exit_code: int) -> int:
    say_error(error)
    return exit_code


def _parser(words: Sequence[str]) -> OneLineParser:
    """Return a parser that knows every command by name, and the arguments of the one that is asked for."""
    parser = OneLineParser(prog="dspark-store", description="Commands on stores of hidden states.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, entry in MODULES.items():
        commands.add_parser(name, help=f"{entry.purpose}: the same as python -m dspark_store.{name}")
    for name, entry in COMMANDS.items():
        command = commands.add_parser(name, help=entry.purpose, description=f"{entry.purpose.capitalize()}.")
        if words[:1] == [name]:
            entry.load().add_arguments(command)
    return parser
