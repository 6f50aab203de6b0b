"""Which rows of a file are read, and in which order."""

import re
from collections.abc import Sequence

import numpy as np

from dspark_store.sources.source import SourceError

_SLICE = re.compile(r"\w+(?:\[(\d*):(\d*)\])?", re.ASCII)


def select_rows(count: int, *, split: str | None, shuffle_seed: int | None, max_samples: int | None) -> Sequence[int]:
    """Return the row numbers to read, of `count` rows, in order.

    First all rows are permuted, by `numpy.random.Generator(numpy.random.PCG64(shuffle_seed)).permutation(count)`
    (None: the order of the file), then the slice is taken, then the first `max_samples`. Slices of one seed that do
    not overlap are therefore disjoint.

    Args:
        count: rows in the file.
        split: None, `name` or `name[a:b]`, with a and b non-negative or left out. The name is not looked at: a file
            is one split.
        shuffle_seed: a non-negative integer or None.
        max_samples: at least 1, or None for all.

    Raises:
        SourceError: an option is malformed, or no row is left.

    """
    chosen = _parse_split(split)
    if shuffle_seed is not None and shuffle_seed < 0:
        raise SourceError(f"shuffle seed {shuffle_seed} is negative; expected a non-negative integer or none")
    if max_samples is not None and max_samples < 1:
        raise SourceError(f"max_samples is {max_samples}; expected at least 1, or none for all")
    rows: Sequence[int] = range(count)
    if shuffle_seed is not None:
        # A memoryview is a sequence of ints that slices without a copy, 8 bytes a row.
        rows = memoryview(np.random.Generator(np.random.PCG64(shuffle_seed)).permutation(count))
    rows = rows[chosen][:max_samples]
    if not len(rows):
        raise SourceError(f"split {split!r} selects none of the {count} rows")
    return rows


def _parse_split(split: str | None) -> slice:
    if split is None:
        return slice(None)
    match = _SLICE.fullmatch(split)
    if match is None:
        raise SourceError(
            f"split {split!r} is not understood; expected name[a:b] with non-negative integers a and b, either of "
            "which may be left out (train[:1000]), or a name or no split for all rows"
        )
    start, stop = (int(bound) if bound else None for bound in match.groups())
    return slice(start, stop)
