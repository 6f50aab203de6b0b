"""``dspark-store``: the commands beside the main job."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dspark_store.precompute.__main__ import USER_ERROR
from dspark_store.precompute.__main__ import main as precompute
from dspark_store.precompute.arguments import OneLineParser
from dspark_store.precompute.preview import add_arguments, show_tokens
from dspark_store.precompute.progress import Progress
from dspark_store.readers.cache import open_cache
from dspark_store.readers.verify import verify_store

DAMAGED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code: 0 good, 1 a damaged store, 2 a mistake told in one line."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["precompute"]:
        return precompute(words[1:])
    try:
        given = _parser().parse_args(words)
        if given.command == "tokens":
            show_tokens(given)
            return 0
        return _verify(given.store)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="dspark-store", description="Commands on stores of hidden states.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("precompute", help="run a target over a corpus: the same as python -m dspark_store.precompute")
    verify = commands.add_parser("verify", help="check every object of a finished store against its own promises")
    verify.add_argument("store", help="the store's directory")
    add_arguments(commands.add_parser("tokens", help="show what a target would be run over, or a report of it"))
    return parser


def _verify(store: str) -> int:
    cache = open_cache(store, allow_reduced_depth=True)
    with Progress("verify", cache.schema.tokens.num_shards, "shards") as progress:
        problems = verify_store(cache, lambda _done, _shards: progress.advance(1))
    for problem in problems:
        samples = f"samples {list(problem.samples[:5])}: " if problem.samples else ""
        print(f"{samples}{problem.message}")
    print(f"{len(cache):,} samples checked, {len(problems):,} problems")
    return DAMAGED if problems else 0
