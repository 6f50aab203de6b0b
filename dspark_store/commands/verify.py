"""``dspark-store verify``: is every object of a store what it promises to be?"""

from __future__ import annotations

import argparse

from dspark_store.precompute.progress import Progress
from dspark_store.readers.cache import open_cache
from dspark_store.readers.verify import verify_store

DAMAGED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("store", help="the store's directory")


def run(given: argparse.Namespace) -> int:
    """Print what is wrong with the store; return 0 when nothing is, else 1."""
    cache = open_cache(given.store, allow_reduced_depth=True)
    with Progress("verify", cache.schema.tokens.num_shards, "shards") as progress:
        problems = verify_store(cache, lambda _done, _shards: progress.advance(1))
    for problem in problems:
        samples = f"samples {list(problem.samples[:5])}: " if problem.samples else ""
        print(f"{samples}{problem.message}")
    print(f"{len(cache):,} samples checked, {len(problems):,} problems")
    return DAMAGED if problems else 0
