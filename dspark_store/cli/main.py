"""``dspark-store``: the way into every command, with one table of exit codes and one line per error."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NoReturn, Protocol, cast

from dspark_store.cli.options import INTERRUPTED, TERMINATED, OneLineParser, exit_code_of, leads
from dspark_store.cli.terminal import show_progress
from dspark_store.progress import Unseen, progress_shown_by
from dspark_store.text import foreseen, one_line, say, say_error

_log = logging.getLogger(__name__)


class Command(Protocol):
    """What the module of a command has. It imports torch and the like in ``run`` only, so that help is quick."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the command."""
        ...

    def run(self, given: argparse.Namespace) -> int:
        """Do it, and return 0, or 1 when something is not as it should be. What it raises, `main` tells in one line."""
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """A command of a name: a module of this package, imported when it is called.

    ``when_interrupted`` says, of a job that works for long, what stays and how to go on.
    """

    name: str
    purpose: str
    when_interrupted: str = ""
    module: str = ""  # where it is not the name, which may be a word of Python's

    def load(self) -> Command:
        """Import the command."""
        return cast(Command, import_module(f"dspark_store.cli.{self.module or self.name}"))


_ENTRIES = (
    Entry("precompute", "run a target over a corpus", "what is committed stays; go on with --resume"),
    Entry("train", "train a draft from a store", "go on from the last checkpoint with --resume"),
    Entry("evaluate", "decode with a trained draft and its target", "nothing was written"),
    Entry("info", "tell what a store is, how far it is and what it takes, on one screen"),
    Entry("head", "show samples of a store: their text, and the norms of their states"),
    Entry("verify", "check every object of a store against its own promises"),
    Entry("repair", "put a damaged store right, or uncommit what a precompute must do again"),
    Entry("stats", "measure norms, channels, lengths and vocabulary of a store"),
    Entry("estimate", "tell how large a store will be, and how long it takes"),
    Entry("diff", "compare two stores: identity, samples, states, weights"),
    Entry("rechunk", "copy a store under other settings, verified"),
    Entry("import", "turn a cache of another project into a store", "what is committed stays", "import_cache"),
    Entry("tokens", "show what a target would be run over, or a report of it"),
    Entry("plot", "draw how trainings went: loss, tokens per step, acceptance"),
    Entry("generate", "let a target answer prompts: chats in its own words"),
)
COMMANDS = {entry.name: entry for entry in _ENTRIES}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code, one of `options.EXIT_CODES`; errors are told in one line on stderr."""
    words = _own_words() if arguments is None else list(arguments)
    entry = COMMANDS.get(words[0]) if words else None
    kept = entry.when_interrupted if entry else ""
    given = argparse.Namespace()
    try:
        given = _parser(words).parse_args(words)
        with progress_shown_by(show_progress if leads() else Unseen):
            return COMMANDS[given.command].load().run(given)
    except KeyboardInterrupt:
        if leads():
            say(f"interrupted: {kept}" if kept else "interrupted", out=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError as error:
        if kept:
            return _tell(error, given)
        sys.stderr.close()  # the reader of the output has seen enough
        return 0
    except Exception as error:  # noqa: BLE001 # whatever it is, users get one line
        return _tell(error, given)


def main_of(name: str) -> Callable[[Sequence[str] | None], int]:
    """Return `main` for one command, whose arguments it is given, or takes from the process."""

    def run(arguments: Sequence[str] | None = None) -> int:
        return main([name, *(_own_words() if arguments is None else arguments)])

    return run


def enter() -> NoReturn:
    """Be the program: run a command, and end the process with its exit code."""
    leave(main())


def leave(code: int) -> NoReturn:
    """End the process, at once where its threads may wait long: for ranks that are gone, or for worker processes."""
    if code == TERMINATED or (code and "RANK" in os.environ):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _own_words() -> list[str]:
    """Return the words that the process was given; libraries draw no bars into its log, nor from another rank."""
    if not (leads() and sys.stderr.isatty()):
        for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):  # the second is transformers' too
            os.environ.setdefault(name, "1")
    return sys.argv[1:]


def _tell(error: Exception, given: argparse.Namespace) -> int:
    code = exit_code_of(error)
    _log.debug("traceback:", exc_info=error)
    alone = os.environ.get("WORLD_SIZE", "1") == "1"  # as text: what is no number is told here too
    rank = "" if alone or "RANK" not in os.environ else f"rank {os.environ['RANK']}: "
    advice = " (--log-level DEBUG shows where)" if not foreseen(error) and "log_level" in given else ""
    say_error(f"{rank}{one_line(error)}{advice}", kind=getattr(error, "kind", "error"))
    return code


def _parser(words: Sequence[str]) -> OneLineParser:
    """Return a parser that knows every command by name, and the arguments of the one that is asked for."""
    parser = OneLineParser(prog="dspark-store", description="Commands on stores of hidden states.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, entry in COMMANDS.items():
        text = f"{entry.purpose[0].upper()}{entry.purpose[1:]}."
        command = commands.add_parser(name, help=entry.purpose, description=text)
        if words[:1] == [name]:
            entry.load().add_arguments(command)
    return parser
