"""``dspark-store rechunk``: a verified copy of a store, under other settings."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dspark_store.cli.options import add_worker_arguments, workers_of
from dspark_store.format.codecs import CODEC_PRESETS
from dspark_store.format.damage import DamagedStoreError, remedy
from dspark_store.format.int8 import AIMS
from dspark_store.format.sizes import of_rows_text
from dspark_store.text import say, size_text

if TYPE_CHECKING:
    from dspark_store.readers.cache import Cache


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("source", help="the store's directory")
    parser.add_argument("destination", help="a new or empty directory, or the same copy, interrupted")
    parser.add_argument("--codec", choices=CODEC_PRESETS, help="compression of the copy; the source's otherwise")
    parser.add_argument("--chunk-tokens", type=int, help="T, the positions of a chunk; the source's otherwise")
    parser.add_argument("--shard-size", type=int, help="R, the samples of a shard; the source's otherwise")
    parser.add_argument("--layers", type=int, nargs="+", help="captured layers to keep, by id; all otherwise")
    parser.add_argument(
        "--mantissa-bits", type=int, metavar="N", help="lossy: round bf16 states to N of their 7 mantissa bits, 1 to 6"
    )
    parser.add_argument("--dtype", choices=tuple(AIMS), help="make int8 states of a lossless store")
    add_worker_arguments(parser, "that copy a shard each")
    parser.add_argument("--take-over", action="store_true", help="push aside another job that is writing the copy")


def run(given: argparse.Namespace) -> int:
    """Copy; return 0 when the copy is whole, 1 when source or copy is damaged. Raises what `rechunk` does."""
    workers = workers_of(given)
    from dspark_store.inspection.copy_plan import CopySettings
    from dspark_store.inspection.rechunk import rechunk
    from dspark_store.readers.cache import open_cache

    settings = CopySettings(
        given.codec, given.chunk_tokens, given.shard_size, given.layers, given.mantissa_bits, given.dtype
    )
    try:
        copied = rechunk(given.source, given.destination, settings, workers=workers, take_over=given.take_over)
    except DamagedStoreError as error:
        mendable = given.destination in str(error) and "dspark-store repair" not in str(error)
        advice = f"; {remedy(given.destination)}" if mendable else ""
        raise DamagedStoreError(f"{error}; what is committed in {given.destination} stays{advice}") from error
    if not copied:
        say(f"{given.destination} is complete; nothing to do")
        return 0
    old, new = (open_cache(path, allow_reduced_depth=True) for path in (given.source, given.destination))
    say(f"{len(new):,} samples are copied, read back and compared: {_tells(old)} became {_tells(new)}")
    return 0


def _tells(cache: Cache) -> str:
    schema = cache.schema
    from dspark_store.precompute.report import stored_bytes

    stored = stored_bytes(cache)
    sizes = f"{size_text(stored)}, {of_rows_text(schema, int(cache.lengths.sum()), stored)}"
    return (
        f"{sizes} ({schema.values}, {schema.codec}, {schema.chunk_tokens} tokens per chunk, {schema.shard_size} "
        f"samples per shard, {schema.num_layers} layers)"
    )
