"""Windows of S tokens over shuffled documents: the document, sample and shuffle indices, as arithmetic.

The corpus is a list of *units* of known lengths. The document index is an order of the units, repeated over epochs;
the units in that order, joined, are the flat stream; sample k covers its positions k * S to (k + 1) * S; the shuffle
index is the order in which samples are served. All shuffles come from one `numpy.random.RandomState(seed)`, whose
stream NumPy has frozen.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dspark_store.sources.source import SourceError

type Rule = Literal["megatron", "hyper_parallel"]

_SEPARATE_BELOW = 0.80  # of an epoch's samples: what the last epoch must give less of to be shuffled by itself


@dataclass(frozen=True, slots=True)
class WindowSettings:
    """What decides the indices, beside the lengths of the units.

    Attributes:
        window: S, tokens in a window.
        seed: of the shuffles.
        num_samples: windows asked for, over as many epochs as that takes; None for those of one epoch.
        rule: "megatron": all windows of the epochs are shuffled, and a last epoch of which less than 80 % is needed
            is shuffled by itself. "hyper_parallel": one shuffle of all epochs, and of the first `num_samples` windows
            only.
        keep_partial: keep a last window shorter than S.
        extra_token: a window also has the token after it, so that its last position has a next token.

    """

    window: int
    seed: int
    num_samples: int | None = None
    rule: Rule = "megatron"
    keep_partial: bool = False
    extra_token: bool = True

    def __post_init__(self) -> None:
        """Check the values; SourceError names the one that cannot be."""
        if self.window < 1:
            raise SourceError(f"window is {self.window}; expected at least 1 token")
        if not 0 <= self.seed < 2**32:
            raise SourceError(f"seed is {self.seed}; expected 0 to 2^32 - 1")
        if self.num_samples is not None and self.num_samples < 1:
            raise SourceError(f"num_samples is {self.num_samples}; expected at least 1, or none for one epoch")
        rules = get_args(Rule.__value__)
        if self.rule not in rules:
            raise SourceError(f"rule is {self.rule!r}; expected one of {', '.join(rules)}")


@dataclass(frozen=True, slots=True)
class WindowIndices:
    """The three indices.

    Attributes:
        document: shape (units * epochs,): the unit in each slot.
        sample: shape (samples + 1, 2): slot and offset in its unit at which each sample starts, and the last one ends.
        shuffle: shape (served,): the samples in the order in which they are served.

    """

    document: NDArray[np.integer]
    sample: NDArray[np.integer]
    shuffle: NDArray[np.integer]

    def pieces(self, served: int, lengths: NDArray[np.integer], *, extra: int) -> Iterator[tuple[int, int, int]]:
        """Yield (unit, start, stop) of the parts of the sample that is served at a place, empty ones left out.

        Args:
            served: place in the shuffle index.
            lengths: of the units.
            extra: tokens past the end of the window to give as well, 0 or 1.

        """
        sample = int(self.shuffle[served])
        (slot, offset), (last_slot, last_offset) = self.sample[sample : sample + 2].tolist()
        for here in range(slot, last_slot + 1):
            unit = int(self.document[here])
            start = offset if here == slot else 0
            stop = last_offset + extra if here == last_slot else int(lengths[unit])
            if stop > start:
                yield unit, start, stop


def build_indices(lengths: NDArray[np.integer], settings: WindowSettings) -> WindowIndices:
    """Return the indices over units of the given lengths.

    Raises:
        SourceError: the units hold no tokens.

    """
    tokens = int(lengths.sum(dtype=np.int64))
    if not tokens:
        raise SourceError(f"the {len(lengths)} documents hold no tokens, so no window can be cut from them")
    epochs = count_epochs(tokens, settings)
    alone = _samples_before_last_epoch(tokens, epochs, settings)
    random = np.random.RandomState(settings.seed)
    document = _document_index(random, len(lengths), epochs, separate=alone is not None)
    sample = _sample_index(lengths, document, tokens * epochs, settings)
    return WindowIndices(document, sample, _shuffle_index(random, len(sample) - 1, alone, settings))


def count_epochs(tokens: int, settings: WindowSettings) -> int:
    """Return the fewest epochs of `tokens` each that hold the samples asked for."""
    if settings.num_samples is None:
        return 1
    needed = settings.num_samples * settings.window + settings.extra_token
    return max(1, -(-needed // tokens))


def _samples_before_last_epoch(tokens: int, epochs: int, settings: WindowSettings) -> int | None:
    """Return the samples of all epochs but the last, if that one is to be shuffled by itself."""
    if settings.rule != "megatron" or settings.num_samples is None or epochs == 1:
        return None
    before = ((epochs - 1) * tokens - settings.extra_token) // settings.window
    per_epoch = (tokens - settings.extra_token) // settings.window
    return before if settings.num_samples - before < int(_SEPARATE_BELOW * per_epoch) else None


def _document_index(random: np.random.RandomState, units: int, epochs: int, *, separate: bool) -> NDArray[np.integer]:
    dtype = np.int32 if units <= np.iinfo(np.int32).max else np.int64
    parts = [epochs - 1, 1] if separate else [epochs]
    shuffled = [np.tile(np.arange(units, dtype=dtype), repeats) for repeats in parts]
    for part in shuffled:
        random.shuffle(part)
    return np.concatenate(shuffled)


def _sample_index(
    lengths: NDArray[np.integer], document: NDArray[np.integer], flat: int, settings: WindowSettings
) -> NDArray[np.integer]:
    """Return where each window starts, by looking its flat position up among the ends of the slots."""
    usable = flat - settings.extra_token
    count = -(-usable // settings.window) if settings.keep_partial else usable // settings.window
    positions = np.minimum(np.arange(count + 1, dtype=np.int64) * settings.window, usable)
    ends = np.cumsum(lengths[document], dtype=np.int64)
    # With the extra token a window starts in the slot that holds its first token; without it, at the end of the slot
    # of the last token before it. Empty slots are passed over, but for the first row, which is (0, 0) in any case.
    slots = np.searchsorted(ends, positions, side="right" if settings.extra_token else "left")
    slots[0] = 0
    offsets = positions - np.where(slots > 0, ends[slots - 1], 0)
    largest = max(len(document), int(lengths.max()))
    dtype = np.int32 if largest <= np.iinfo(np.int32).max else np.int64
    return np.stack([slots, offsets], axis=1).astype(dtype)


def _shuffle_index(
    random: np.random.RandomState, samples: int, alone: int | None, settings: WindowSettings
) -> NDArray[np.integer]:
    if settings.rule == "hyper_parallel" and settings.num_samples is not None:
        samples = min(samples, settings.num_samples)
    dtype = np.int32 if samples <= np.iinfo(np.int32).max else np.int64
    split = [] if alone is None else [alone]
    parts = np.split(np.arange(samples, dtype=dtype), split)
    for part in parts:
        random.shuffle(part)
    return np.concatenate(parts)


def split_units(count: int, weights: str, part: str) -> tuple[int, int]:
    """Return the first and one past the last unit of a part of a corpus, as Megatron-LM's `--split` cuts it.

    Args:
        count: units in the corpus.
        weights: up to three numbers for train, valid and test, such as "990,9,1"; they need not sum to 1.
        part: "train", "valid" or "test".

    Raises:
        SourceError: the weights or the name are not understood.

    """
    names = ("train", "valid", "test")
    if part not in names:
        raise SourceError(f"part is {part!r}; expected one of {', '.join(names)}")
    try:
        numbers = [float(number) for number in weights.split(",")]
    except ValueError:
        numbers = []
    total = sum(numbers)
    if not 1 <= len(numbers) <= len(names) or not all(number >= 0 for number in numbers) or not 0 < total < np.inf:
        raise SourceError(f"parts is {weights!r}; expected up to three weights for {', '.join(names)}, such as 990,9,1")
    numbers += [0.0] * (len(names) - len(numbers))
    fractions = [0.0, *accumulate(number / total for number in numbers)]
    first = names.index(part)
    return round(fractions[first] * count), round(fractions[first + 1] * count)
