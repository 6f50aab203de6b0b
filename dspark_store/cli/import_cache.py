"""``dspark-store import``: a cache of another project as a store."""

from __future__ import annotations

import argparse

from dspark_store.progress import start_progress
from dspark_store.text import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("cache", help="the folder of a cache; today NeMo Automodel's DSpark cache")
    parser.add_argument("--output-dir", required=True, help="a new or empty directory, or the same import, interrupted")
    parser.add_argument(
        "--pad-token-id", type=int, help="cut this padding off rows, whose true lengths the cache does not record"
    )


def run(given: argparse.Namespace) -> int:
    """Import; return 0 when the store is complete. Raises what `import_cache` does."""
    from dspark_store.compat.imports import find_cache, import_cache

    cache = find_cache(given.cache)
    say(cache.told())
    with start_progress("import", len(cache.shards), "shards") as progress:
        written = import_cache(
            cache, given.output_dir, pad_token_id=given.pad_token_id, on_shard=lambda: progress.advance(1, "")
        )
    say(f"{given.output_dir} is complete: {written} shards written, {len(cache.shards) - written} were there")
    return 0
