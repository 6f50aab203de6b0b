"""Which samples an epoch gives, in what order, to which rank. Pure arithmetic, the same on every machine.

Orders come from keys made by SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
2014), not from a library's generator, whose stream may change. docs/order.md specifies them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from dspark_store.format.grid import SPLITMIX64_GAMMA, splitmix64

type EndRule = Literal["drop", "short", "even", "repeat"]

_WORD = 1 << 64
_LOW = (1 << 32) - 1
_SPLIT_BITS = 53

_SAMPLE_TAG = 1
_SHARD_TAG = 2
_SPLIT_TAG = 3


@dataclass(frozen=True, slots=True)
class ShardWindow:
    """Shuffle shards, then samples within each run of ``shards`` shards of ``shard_size`` samples: for slow storage."""

    shard_size: int
    shards: int

    def __post_init__(self) -> None:
        for name in ("shard_size", "shards"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} of a shard window must be >= 1, got {value}")


def epoch_order(
    samples: np.ndarray | int,
    *,
    seed: int,
    epoch: int,
    shuffle: bool = True,
    window: ShardWindow | None = None,
) -> np.ndarray:
    """Return the order of an epoch's samples, (M,) int64.

    ``samples`` holds the M distinct sample indices to order, in any order, or is N for all of 0..N-1. The order is a
    function of that set, ``seed`` and ``epoch``: leaving a sample out does not move the others (with ``window``, unless
    it was its shard's only one). Without ``shuffle`` it is ascending. ValueError for a seed or epoch outside 0..2^64-1,
    a sample outside 0..2^32-1, or an array that is not one of integers with one axis.
    """
    samples = _sample_indices(samples)
    if not shuffle:
        return np.sort(samples)
    order = _shuffle(samples, _start(_SAMPLE_TAG, seed, epoch))
    if window is None or not order.size:
        return order
    return order[np.argsort(_window_of(order, window, seed, epoch), kind="stable")]


def _sample_indices(samples: np.ndarray | int) -> np.ndarray:
    if isinstance(samples, int):
        if not 0 <= samples <= _LOW + 1:
            raise ValueError(f"the number of samples must be between 0 and 2^32, got {samples}")
        return np.arange(samples, dtype=np.int64)
    if samples.ndim != 1 or not np.issubdtype(samples.dtype, np.integer):
        raise ValueError(f"samples must be integers with one axis, got {samples.dtype} of shape {samples.shape}")
    if samples.size and not 0 <= samples.min() <= samples.max() <= _LOW:
        raise ValueError(f"samples must be between 0 and 2^32 - 1, got {samples.min()} to {samples.max()}")
    return samples.astype(np.int64, copy=False)


def _window_of(samples: np.ndarray, window: ShardWindow, seed: int, epoch: int) -> np.ndarray:
    """Return the window of each sample: shards that have a sample, by their keys, in runs of ``window.shards``."""
    shard_of = samples // window.shard_size
    present = np.flatnonzero(np.bincount(shard_of))
    place = np.zeros(int(present[-1]) + 1, np.int64)
    place[_shuffle(present, _start(_SHARD_TAG, seed, epoch))] = np.arange(present.size)
    small = np.min_scalar_type(present.size // window.shards)  # up to 16 bits are sorted by radix, much faster
    windows: np.ndarray = (place // window.shards).astype(small)[shard_of]
    return windows


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How the ``count`` items of an epoch (samples in their order, or packed rows) fall into batches.

    The epoch is cut into global batches of ``batch_size * dp_size`` consecutive items, and each of those into one
    contiguous run a rank: another world size with the same global batch gives the same stream of global batches. Every
    rank has the same number of batches. The last global batch, when it is not full, is dropped ("drop"), split as
    evenly as it goes, so that ranks' sizes differ by at most one and a rank may get none ("short"), filled by starting
    the order again just so far that every rank gets equally many ("even", torch's DistributedSampler's rule), or filled
    to a whole global batch ("repeat").
    """

    count: int
    batch_size: int
    dp_size: int
    last: EndRule

    def __post_init__(self) -> None:
        for name, least in (("count", 0), ("batch_size", 1), ("dp_size", 1)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} must be >= {least}, got {value}")
        if self.last not in ("drop", "short", "even", "repeat"):
            raise ValueError(f"the end rule is {self.last!r}; choose from drop, short, even, repeat")

    @property
    def global_batch(self) -> int:
        """Items of a full batch over all ranks."""
        return self.batch_size * self.dp_size

    @property
    def steps(self) -> int:
        """Batches that every rank yields in an epoch."""
        if self.last == "drop":
            return self.count // self.global_batch
        return -(-self.count // self.global_batch)

    @property
    def dropped(self) -> int:
        """Items at the end of the order that no rank gets."""
        return max(0, self.count - self.steps * self.global_batch)

    @property
    def repeated(self) -> int:
        """Items that are given a second time (or more often, when the epoch is smaller than a batch)."""
        return self._given - self.count if self.last in ("even", "repeat") else 0

    @property
    def _given(self) -> int:
        """Items that all ranks together get, repeated ones counted again."""
        if self.last in ("drop", "repeat"):
            return self.steps * self.global_batch
        if self.last == "even":
            return -(-self.count // self.dp_size) * self.dp_size
        return self.count

    def global_positions(self, step: int) -> np.ndarray:
        """Return the positions in the epoch's order that all ranks together get at ``step``, int64.

        IndexError when the epoch has no such step.
        """
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} is outside the epoch's {self.steps} steps")
        first = step * self.global_batch
        return np.arange(first, min(first + self.global_batch, self._given)) % self.count

    def positions(self, step: int, dp_rank: int) -> np.ndarray:
        """Return the positions in the epoch's order that a rank gets at ``step``, int64; empty at most at the end.

        IndexError when there is no such step or rank.
        """
        if not 0 <= dp_rank < self.dp_size:
            raise IndexError(f"dp_rank {dp_rank} is outside the {self.dp_size} ranks")
        batch = self.global_positions(step)
        return batch[batch.size * dp_rank // self.dp_size : batch.size * (dp_rank + 1) // self.dp_size]


@dataclass(frozen=True, slots=True)
class LoaderState:
    """Where a loader stands: ``consumed`` of the epoch's ``count`` items are behind all ranks together.

    It holds under any world size with the same global batch. All ranks have the same state.
    """

    epoch: int
    consumed: int
    count: int
    global_batch: int

    @classmethod
    def after(cls, plan: BatchPlan, *, epoch: int, steps: int) -> LoaderState:
        """Return the state once ``steps`` batches of an epoch were yielded; IndexError when it has fewer."""
        if not 0 <= steps <= plan.steps:
            raise IndexError(f"{steps} steps were asked for, the epoch has {plan.steps}")
        return cls(epoch, steps * plan.global_batch, plan.count, plan.global_batch)

    def steps_done(self, plan: BatchPlan) -> int:
        """Return how many of a plan's steps are behind this state.

        ValueError when the plan cuts the epoch otherwise, so that the stream could not go on where it stopped.
        """
        if plan.global_batch != self.global_batch:
            raise ValueError(
                f"the state was saved with a global batch of {self.global_batch}, this loader has {plan.global_batch} "
                f"({plan.batch_size} x {plan.dp_size} ranks): choose batch_size so that the product is the same"
            )
        if plan.count != self.count:
            raise ValueError(
                f"the state was saved in an epoch of {self.count} items, this loader's has {plan.count}: load it with "
                "the same store and the same choice of samples, or start at an epoch's beginning"
            )
        steps, rest = divmod(self.consumed, self.global_batch)
        if rest or not 0 <= steps <= plan.steps:
            raise ValueError(
                f"the state has {self.consumed} items consumed, which is not one of the epoch's {plan.steps} steps of "
                f"{self.global_batch}: it was saved by something else or with another end rule"
            )
        return steps


@dataclass(frozen=True, slots=True, eq=False)
class Admitted:
    """The samples that training may use, (M,) int64 ascending, and how many were left out for which reason."""

    samples: np.ndarray
    not_good: int
    unsupervised: int


def admitted(
    supervised: np.ndarray, status: np.ndarray, *, min_supervised: int, among: np.ndarray | None = None
) -> Admitted:
    """Choose the samples whose status is 0 (good) and that have at least ``min_supervised`` supervised tokens.

    ``supervised`` and ``status`` are the store's index columns, (N,). ``among``, (N,) bool, restricts the choice, to
    one side of a split say; samples outside it are not counted. A sample left out for both reasons counts as not good.
    ValueError when the shapes differ.
    """
    chosen = np.ones(supervised.shape, np.bool_) if among is None else among.astype(np.bool_, copy=False)
    if not supervised.shape == status.shape == chosen.shape or supervised.ndim != 1:
        raise ValueError(
            f"supervised, status and among must have one value a sample, got shapes {supervised.shape}, "
            f"{status.shape} and {chosen.shape}"
        )
    good = chosen & (status == 0)
    kept = good & (supervised >= min_supervised)
    totals = [int(np.count_nonzero(mask)) for mask in (chosen, good, kept)]
    return Admitted(np.flatnonzero(kept).astype(np.int64), totals[0] - totals[1], totals[1] - totals[2])


def split_mask(digests: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Choose about ``fraction`` of the samples by content: (N,) bool, True for validation.

    ``digests`` is the store's ``index/digest``, (N, 2) uint64. A sample's side depends on its own digest and the seed
    alone: it stays when the corpus grows or is reordered, equal samples are on one side, and a larger fraction keeps
    what a smaller one chose. ValueError for another shape or dtype, or a fraction outside 0..1.
    """
    if digests.ndim != 2 or digests.shape[1] != 2 or digests.dtype != np.uint64:
        raise ValueError(f"digests must be (N, 2) uint64, got {digests.dtype} of shape {digests.shape}")
    if not 0 <= fraction <= 1:
        raise ValueError(f"the validation fraction must be between 0 and 1, got {fraction}")
    keys = _fold(_fold(_start(_SPLIT_TAG, seed), digests[:, 0]), digests[:, 1])
    return keys >> (64 - _SPLIT_BITS) < int(fraction * 2**_SPLIT_BITS)


def _fold(state: np.ndarray, word: np.ndarray) -> np.ndarray:
    """Take another word into a state: the first SplitMix64 output after the seed ``state ^ word``."""
    return splitmix64((state ^ word) + np.uint64(SPLITMIX64_GAMMA))


def check_word(name: str, word: int) -> None:
    """Raise ValueError unless a number can go into a key: 0..2^64-1."""
    if not 0 <= word < _WORD:
        raise ValueError(f"{name} must be between 0 and 2^64 - 1, got {word}")


def _start(tag: int, *words: int) -> np.ndarray:
    """Return the state of one use of the generator, (1,) uint64: 0, with the tag and then the words taken in."""
    state = np.zeros(1, np.uint64)
    for word in (tag, *words):
        check_word("seed and epoch", word)
        state = _fold(state, np.array([word], np.uint64))
    return state


def _shuffle(items: np.ndarray, state: np.ndarray) -> np.ndarray:
    """Return items, int64 below 2^32, by the upper halves of their keys and then by themselves.

    Key and item share a word, because sorting words takes a fifth of the time of sorting their indices.
    """
    words = _keys(state, items)
    words &= np.uint64(_WORD - 1 - _LOW)
    words |= items.astype(np.uint64)
    words.sort()
    words &= np.uint64(_LOW)
    return words.astype(np.int64)


def _keys(state: np.ndarray, items: np.ndarray) -> np.ndarray:
    """Return SplitMix64's outputs number ``items`` (0 first) after the seed ``state``."""
    return splitmix64((items.astype(np.uint64) + np.uint64(1)) * np.uint64(SPLITMIX64_GAMMA) + state)
