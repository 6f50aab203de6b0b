"""``dspark-store tokens``: what a target would be run over, before anything is captured."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import TextIO

from dspark_store.cli.options import add_settings
from dspark_store.sources.options import ChatOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "data", nargs="*", help="files, globs or datasets of conversations, or any source as a configuration has it"
    )
    parser.add_argument("--tokenizer", "--target-model", dest="model", help="the target: its tokenizer is used")
    parser.add_argument("--rows", type=int, nargs="+", help="rows to show, counted from 0; the first three otherwise")
    parser.add_argument("--report", action="store_true", help="read the whole source and tell what became of its rows")
    parser.add_argument(
        "--compare",
        metavar="STORE",
        help="count the samples of a store whose ids or masks would be others today; what is not given is as it says",
    )
    parser.add_argument("--chat-template", help="a chat template, inline Jinja, a file or a name")
    parser.add_argument("--seq-length", type=int, help="the most tokens a sample has (default: 2048)")
    parser.add_argument("--split", help="a slice of the rows, name[a:b], taken after the shuffle")
    parser.add_argument("--shuffle-seed", type=int, help="seed of the order of rows; without it, that of the data")
    parser.add_argument("--max-samples", type=int, help="at most this many rows, after shuffle and split")
    add_settings(parser, {option.name: option for option in fields(ChatOptions)})
    parser.add_argument("--num-workers", type=int, default=0, help="processes that tokenise; 0 tokenises in this one")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the target's repository run its own code")


def run(given: argparse.Namespace, out: TextIO | None = None) -> int:
    """Print samples, the report of a whole source, or its comparison with a store; return 0."""
    from dspark_store.cli.token_report import show_tokens

    return show_tokens(given, out)
