"""``dspark-store repair``: put a damaged store right, as far as the rest of it tells, and uncommit the rest."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from dspark_store.cli.options import add_worker_arguments, workers_of
from dspark_store.inspection.repair.plan import repair
from dspark_store.inspection.repair.state import RepairState
from dspark_store.text import say

_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("store", help="the store's directory")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    add_worker_arguments(parser, "that look at the shards")


def run(given: argparse.Namespace) -> int:
    """Repair the store and print what was done; return 0, or 1 when it cannot be repaired."""
    plan = repair(given.store, workers_of(given), dry_run=given.dry_run)
    for line in lines_of(plan, given.store):
        say(line)
    if given.dry_run and not plan.empty:
        say("dry run: nothing was changed")
    return 0


def lines_of(plan: RepairState, store: str) -> list[str]:
    """Return what a repair says of itself, and what is to be done next."""
    left = _listed("left", [f"{key}: no name of an object, so move it elsewhere yourself" for key in plan.left])
    if plan.empty:
        return [*left, f"{store}: nothing to repair"]
    lines = [*_listed("restored", plan.restored), *_listed("removed", plan.removed), *left]
    lines += _uncommitted("tokens", plan.tokens, plan) + _uncommitted("states", plan.states, plan)
    if plan.weights:
        lines.append(f"uncommitted  the target's tables: {plan.weights}")
    if plan.swept:
        lines.append(f"removed      {_count(plan.swept, 'file')} that no commit promises")
    return [*lines, _next(plan, store)]


def _listed(word: str, keys: Sequence[str]) -> list[str]:
    more = [f"{word:<12} and {len(keys) - _SHOWN:,} more"] if len(keys) > _SHOWN else []
    return [*(f"{word:<12} {key}" for key in keys[:_SHOWN]), *more]


def _uncommitted(what: str, shards: Mapping[int, str], plan: RepairState) -> list[str]:
    lines = [
        f"uncommitted  {what} of shard {shard} (samples {plan.samples_of(shard)}): {why}"
        for shard, why in sorted(shards.items())[:_SHOWN]
    ]
    if len(shards) > _SHOWN:
        lines.append(f"uncommitted  {what} of {len(shards) - _SHOWN:,} more shards")
    return lines


def _next(plan: RepairState, store: str) -> str:
    if plan.record.complete:
        return f"{store} is complete"
    if plan.record.copied_from is not None:
        return f"next: run the dspark-store rechunk that made {store} once more: it copies what is missing, and no more"
    if "source" not in plan.record.manifest:
        return f"next: write the missing shards of {store} again, as they were written before"
    work = [f"reads the tokens of {_count(len(plan.tokens), 'shard')} from the source"] if plan.tokens else []
    work += [f"runs the target over {_count(plan.samples, 'sample')}"] if plan.samples else []
    work += ["writes the target's tables"] if plan.weights else []
    return f"next: run the same precompute on {store} with --resume: it {', '.join(work) or 'completes the store'}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
