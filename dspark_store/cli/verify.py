"""``dspark-store verify``: is every object of a store what it promises to be?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dspark_store.cli.options import DAMAGED, add_worker_arguments, workers_of
from dspark_store.format.damage import DamagedStoreError, Part, Problem
from dspark_store.format.metadata import ROOT_KEY
from dspark_store.format.storage import LocalStorage
from dspark_store.inspection.verification import Verification, problem_line, verify
from dspark_store.text import say, say_json, size_text

if TYPE_CHECKING:  # torch takes seconds, and is needed for --recompute only
    from dspark_store.inspection.recomputing import Recomputed

_SHOWN = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("store", help="the store's directory")
    parser.add_argument("--quick", action="store_true", help="sizes and trailers only, no chunk: after a copy")
    parser.add_argument("--recompute", type=_positive, metavar="N", help="run the target again on N random samples")
    parser.add_argument("--target-model", help="for --recompute: the target that the store was made with")
    parser.add_argument("--seed", type=int, default=0, help="for --recompute: which samples are drawn (default: 0)")
    parser.add_argument(
        "--tolerance", type=float, default=0.0, help="for --recompute: the difference that is no problem (default: 0)"
    )
    parser.add_argument("--device", help="for --recompute: where the target runs; CUDA if there is any")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the target's repository run its own code")
    add_worker_arguments(parser, "that check shards")
    parser.add_argument("--json", action="store_true", help="print all that was found as JSON")


def run(given: argparse.Namespace) -> int:
    """Print what is wrong with the store; return 0 when nothing is, else 1."""
    if (given.recompute is None) != (given.target_model is None):
        raise ValueError("--recompute and --target-model go together: how many samples, and what computes them")
    storage = LocalStorage(given.store)
    found = verify(storage, quick=given.quick, workers=workers_of(given))
    fresh: list[Recomputed] = []
    if given.recompute is not None:
        try:
            fresh, more = _recompute(given, storage, found)
        except DamagedStoreError as error:
            if not found.problems:
                raise
            more = [Problem(Part.ROOT, ROOT_KEY, None, (), f"nothing was recomputed: {error}")]
        in_order = sorted([*found.problems, *more], key=lambda problem: problem.order)
        found = replace(found, problems=tuple(in_order))
    if given.json:
        say_json({**found.to_json(), "recomputed": [result.to_json() for result in fresh]})
    else:
        _print(found, fresh)
    return DAMAGED if found.problems else 0


def _recompute(
    given: argparse.Namespace, storage: LocalStorage, found: Verification
) -> tuple[list[Recomputed], list[Problem]]:
    """Recompute random samples that nothing else is wrong with; return their differences, and the problems of them."""
    from dspark_store.inspection.recomputing import draw_samples, recompute_samples
    from dspark_store.readers.cache import Cache
    from dspark_store.target.device import device_named
    from dspark_store.target.source import TargetSource

    cache = Cache(storage, allow_incomplete=True, verify=True)
    source = TargetSource(given.target_model, given.trust_remote_code)
    samples = draw_samples(cache, given.recompute, given.seed, found.hit)
    return recompute_samples(cache, source, device_named(given.device), samples, given.tolerance)


def _print(found: Verification, fresh: Sequence[Recomputed]) -> None:
    for problem in found.problems[:_SHOWN]:
        say(problem_line(problem))
    if len(found.problems) > _SHOWN:
        say(f"... and {len(found.problems) - _SHOWN:,} more problems; --json lists them all")
    for line in found.links.lines():
        say(line)
    if fresh:
        equal = sum(result.difference == 0 for result in fresh)
        worst = max(fresh, key=lambda result: (result.difference != result.difference, result.difference))
        rest = f"; the largest difference is {worst.difference:.3g}, of sample {worst.sample}"
        say(f"{len(fresh)} samples recomputed, {equal} equal bit by bit{rest if equal < len(fresh) else ''}")
    rate = f"{size_text(found.nbytes)} at {size_text(found.nbytes / found.seconds)}/s"
    what = "sizes and trailers only" if found.quick else rate
    hit = f", which hit {len(found.hit):,} samples" if found.hit else ""
    count = f"{len(found.problems):,} problem{'' if len(found.problems) == 1 else 's'}"
    say(f"{found.samples:,} samples checked, {count}{hit} ({found.shards:,} shards, {what})")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
