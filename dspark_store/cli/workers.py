"""Who does the work of a command on every shard: its two arguments."""

from __future__ import annotations

import argparse

from dspark_store.inspection.shardwise import Workers


def add_worker_arguments(parser: argparse.ArgumentParser, do: str) -> None:
    """Add ``--threads`` and ``--scheduler``; ``do`` says what the workers do, as in "that read"."""
    parser.add_argument("--threads", type=int, help=f"threads {do}; by default one a core")
    parser.add_argument(
        "--scheduler",
        help=f"address of a dask scheduler (tcp://host:8786): workers of its cluster {do}, and see the same paths",
    )


def workers_of(given: argparse.Namespace) -> Workers:
    """Return the workers that were asked for; ValueError for fewer than one thread."""
    if given.threads is not None and given.threads < 1:
        raise ValueError(f"--threads must be >= 1, got {given.threads}")
    return Workers(given.threads, given.scheduler)
