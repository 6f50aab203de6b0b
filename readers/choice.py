"""Which samples of a store a loader gives at all."""

from __future__ import annotations

import logging
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


def choose_samples(cache: Cache, *, min_supervised: int, split: Split | None) -> np.ndarray:
    """Return the samples to load, (M,) int64 ascending, and log how many are left out for which reason.

    Left out are those with non-finite states and those of fewer than ``min_supervised`` supervised tokens. ValueError
    when none is left.
    """
    among = None if split is None else split.mask(cache)
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
        raise ValueError(
            f"no sample is left to load: of {where}{len(cache)} samples, {chosen.not_good} are not good and "
            f"{chosen.unsupervised} have fewer than {min_supervised} supervised tokens"
        )
    return chosen.samples
