"""Checking a whole store against its own promises, without the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dspark_store.format.problem import Problem
from dspark_store.format.storage import Storage
from dspark_store.readers.checks.arrays import check_promises, check_weights
from dspark_store.readers.checks.listing import check_strays, known_shards
from dspark_store.readers.checks.shard import ShardCheck, check_identity, open_view
from dspark_store.readers.checks.view import StoreView

if TYPE_CHECKING:
    from dspark_store.readers.cache import Cache


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found about a store as a whole, before any shard is looked at.

    ``view`` is None when the metadata cannot be trusted; then there are no ``shards`` to look at.
    """

    view: StoreView | None
    shards: Sequence[int]
    problems: tuple[Problem, ...]

    def shard_check(self) -> ShardCheck:
        """Return the check of one shard; ValueError when the store has none to check."""
        if self.view is None:
            raise ValueError("a store whose metadata cannot be trusted has no shards to check")
        return ShardCheck(self.view)


def survey_store(storage: Storage, *, quick: bool = False) -> Survey:
    """Check what a store has once: metadata, index, weights, and objects that belong to no part of it.

    ``quick`` leaves out the chunks of the columns, here and in the checks of the shards that follow. FileNotFoundError
    or ValueError where there is no store at all.
    """
    view, problems = open_view(storage, quick=quick)
    if view is None:
        return Survey(None, range(0), tuple(problems))
    shards = known_shards(view)
    problems += check_weights(storage, view.record)
    problems += check_promises(problems)
    problems += check_identity(view, shards)
    problems += check_strays(view)
    return Survey(view, shards, tuple(problems))


def verify_store(cache: Cache, progress: Callable[[int, int], None] | None = None) -> list[Problem]:
    """Check every object of a store that is open for reading: ledger, trailers, chunks, index, weights, metadata.

    The store is opened anew, so that nothing which ``cache`` already holds hides damage. Of a growing store the
    committed shards are checked. ``progress`` is called with (shards done, shards). Returns the problems found, sorted;
    an empty list for a good store.
    """
    survey = survey_store(cache.storage)
    problems = list(survey.problems)
    for done, shard in enumerate(survey.shards, start=1):
        problems += survey.shard_check()(shard).problems
        if progress is not None:
            progress(done, len(survey.shards))
    return sorted(problems, key=lambda problem: problem.order)
