"""Windows of S tokens over shuffled documents: the document, sample and shuffle indices, as arithmetic.

The corpus is a list of *units* of known lengths. The document index is an order of the units, repeated over epochs;
the units in that order, joined, are the flat stream; sample k covers its positions k * S to (k + 1) * S; the shuffle
index is the order in which samples are served. All shuffles come from one `numpy.random.RandomState(seed)`, whose
stream NumPy has frozen.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dspark_store.sources.source import SourceError

logger = logging.getLogger(__name__)

type Rule = Literal["megatron", "hyper_parallel"]

CACHE_VERSION = 1
_ARRAYS = ("document", "sample", "shuffle")
_DIGESTS = "digests.json"
_WORK_NAME = re.compile(r"\.[0-9a-f]{64}\.\w+")
_ABANDONED_AFTER = 24 * 3600.0  # seconds
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
    needed = 0 if settings.num_samples is None else settings.num_samples * settings.window + settings.extra_token
    epochs = max(1, -(-needed // tokens))
    alone = _samples_before_last_epoch(tokens, epochs, settings)
    random = np.random.RandomState(settings.seed)
    units = np.arange(len(lengths), dtype=_dtype_up_to(len(lengths)))
    document = _shuffled(random, [np.tile(units, times) for times in ([epochs] if alone is None else [epochs - 1, 1])])
    sample = _sample_index(lengths, document, tokens * epochs, settings)
    served = len(sample) - 1
    if settings.rule == "hyper_parallel" and settings.num_samples is not None:
        served = min(served, settings.num_samples)
    samples = np.arange(served, dtype=_dtype_up_to(served))
    return WindowIndices(document, sample, _shuffled(random, np.split(samples, [] if alone is None else [alone])))


def _samples_before_last_epoch(tokens: int, epochs: int, settings: WindowSettings) -> int | None:
    """Return the samples of all epochs but the last, if that one is to be shuffled by itself."""
    if settings.rule != "megatron" or settings.num_samples is None or epochs == 1:
        return None
    before = ((epochs - 1) * tokens - settings.extra_token) // settings.window
    per_epoch = (tokens - settings.extra_token) // settings.window
    return before if settings.num_samples - before < int(_SEPARATE_BELOW * per_epoch) else None


def _dtype_up_to(largest: int) -> type[np.integer]:
    return np.int32 if largest <= np.iinfo(np.int32).max else np.int64


def _shuffled(random: np.random.RandomState, parts: list[NDArray[np.integer]]) -> NDArray[np.integer]:
    """Return the parts, each shuffled by itself, joined."""
    for part in parts:
        random.shuffle(part)
    return np.concatenate(parts)


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
    return np.stack([slots, offsets], axis=1).astype(_dtype_up_to(max(len(document), int(lengths.max()))))


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


def cache_key(lengths: NDArray[np.int64], settings: WindowSettings) -> str:
    """Return the name of the indices: SHA-256, in hex, of all that decides them, the lengths of the units included.

    Where the corpus lies is not in it, and neither are its token ids: the indices do not depend on them.
    """
    facts = {
        "version": CACHE_VERSION,
        "lengths_sha256": hashlib.sha256(np.ascontiguousarray(lengths, "<i8")).hexdigest(),
        **asdict(settings),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def cached_indices(lengths: NDArray[np.int64], settings: WindowSettings, directory: Path | None) -> WindowIndices:
    """Return the indices, from the cache if it has them, else built and then kept there.

    Any number of processes may do so at once: a set of indices appears whole, under its final name, and the first to
    finish wins. Sets that are damaged are built again. Where `directory` cannot be written, the user's own cache
    directory is tried, and then nothing is kept; a warning says which.

    Args:
        lengths: int64, shape (units,): tokens in each unit.
        settings: see `WindowSettings`.
        directory: where the sets are kept; None keeps none.

    Raises:
        SourceError: the units hold no tokens.

    """
    if directory is None:
        return build_indices(lengths, settings)
    key = cache_key(lengths, settings)
    places = [place / key for place in (directory, user_cache_directory()) if place is not None]
    for place in places:
        found = _load(place)
        if found is not None:
            return found
    indices = build_indices(lengths, settings)
    for place in places:
        try:
            _save(place, indices)
        except OSError as error:
            logger.warning("%s cannot hold the indices of the windows: %s", place.parent, error.strerror or error)
        else:
            return indices
    logger.warning("the indices of the windows are kept nowhere, and are built again each time")
    return indices


def user_cache_directory() -> Path | None:
    """Return where this user's indices go when the directory of the corpus cannot be written; None without a home."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "dspark-store" / "megatron"
    except RuntimeError:
        return None


def _load(place: Path) -> WindowIndices | None:
    """Return the indices of one set, mapped read-only, or None if it is not there or not what was written."""
    if not place.is_dir():
        return None
    try:
        digests = json.loads((place / _DIGESTS).read_text())
        indices = WindowIndices(
            *(np.load(place / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS)
        )
        if digests == _digests(indices):
            return indices
        problem = "its checksums are not those that were written"
    except (OSError, ValueError, EOFError) as error:
        problem = str(error)
    logger.warning("%s cannot be used and is built again: %s", place, problem)
    shutil.rmtree(place, ignore_errors=True)
    return None


def _save(place: Path, indices: WindowIndices) -> None:
    """Write one set beside its place, then move it there; OSError if that cannot be."""
    place.parent.mkdir(parents=True, exist_ok=True)
    _sweep(place.parent)
    work = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    try:
        work.chmod(0o755)  # others who read the corpus may read these too
        for name, array in ((name, getattr(indices, name)) for name in _ARRAYS):
            np.save(work / f"{name}.npy", array, allow_pickle=False)
        (work / _DIGESTS).write_text(json.dumps(_digests(indices)))  # what a power failure tears, the digests show
        try:
            work.rename(place)
        except OSError:
            if not place.is_dir():  # else another process was first, and its set is the same
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _sweep(directory: Path) -> None:
    """Remove what processes that were killed left behind."""
    for left in directory.glob(".*.*"):
        if _WORK_NAME.fullmatch(left.name):  # the directory may be the user's, with other files in it
            with contextlib.suppress(OSError):  # its process may be removing it just now
                if time.time() - left.stat().st_mtime > _ABANDONED_AFTER:
                    shutil.rmtree(left, ignore_errors=True)


def _digests(indices: WindowIndices) -> dict[str, str]:
    digests = {}
    for name in _ARRAYS:
        array = getattr(indices, name)
        digest = hashlib.sha256(f"{array.dtype.str} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
        digests[name] = digest.hexdigest()
    return digests
