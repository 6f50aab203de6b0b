"""Which samples of a store a loader gives at all."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dspark_store.readers.cache import Cache
from dspark_store.readers.order import admitted, split_mask

type Side = Literal["train", "validation"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Split:
    """One side of a split by content: about ``fraction`` of the samples are for validation; see `split_mask`."""

    side: Side
    fraction: float
    seed: int

    def __post_init__(self) -> None:
        if self.side not in ("train", "validation"):
            raise ValueError(f"the side of a split is {self.side!r}; choose from train, validation")

    def mask(self, cache: Cache) -> np.ndarray:
        """Return (N,) bool: whether each sample is on this side."""
        validation = split_mask(cache.index.digest, self.fraction, self.seed)
        return validation if self.side == "validation" else ~validation


def from_sources(cache: Cache, names: Sequence[str]) -> np.ndarray:
    """Return (N,) bool: whether each sample came from one of the named sources of its store.

    ValueError, with the nearest name, when the store has no source of a name; without names, none is chosen.
    """
    if isinstance(names, str):
        raise ValueError(f"sources are a list of names, got {names!r}; give [{names!r}]")
    for name in names:
        if name not in cache.sources:
            near = difflib.get_close_matches(str(name), cache.sources, 1, cutoff=0.0)
            known = f"the nearest is {near[0]!r}" if near else "it was not made from a blend"
            raise ValueError(f"the store has no source {name!r}; {known}")
    return np.isin(cache.source, [cache.sources.index(name) for name in names])


def choose_samples(
    cache: Cache, *, min_supervised: int, split: Split | None, sources: Sequence[str] | None = None
) -> np.ndarray:
    """Return the samples to load, (M,) int64 ascending, and log how many are left out for which reason.

    Left out are those with non-finite states and those of fewer than ``min_supervised`` supervised tokens; ``sources``
    restricts the choice to those of a blend's parts. ValueError when none is left.
    """
    among = None if split is None else split.mask(cache)
    if sources is not None:
        named = from_sources(cache, sources)
        among = named if among is None else among & named
    chosen = admitted(cache.supervised, cache.status, min_supervised=min_supervised, among=among)
    _log.info(
        "%d of %d samples; left out: %d with non-finite states, %d with fewer than %d supervised tokens",
        len(chosen.samples),
        len(cache),
        chosen.not_good,
        chosen.unsupervised,
        min_supervised,
    )
    if not len(chosen.samples):
        where = f"the {split.side} side of " if split is not None else ""
        where += f"sources {', '.join(sources)} in " if sources is not None else ""
        raise ValueError(
            f"no sample is left to load: of {where}{len(cache)} samples, {chosen.not_good} are not good and "
            f"{chosen.unsupervised} have fewer than {min_supervised} supervised tokens"
        )
    return chosen.samples
