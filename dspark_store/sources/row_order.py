"""Which rows of a file are read, and in which order."""

import re
from collections.abc import Sequence

import numpy as np

from dspark_store.sources.source import SourceError

_BOUND = r"(-?\d+%?)?"
_SPLIT = re.compile(rf"(\w[\w.-]*)(?:\[{_BOUND}:{_BOUND}\])?", re.ASCII)
_AFTER_AUTOMODELS_SHUFFLE = re.compile(r"\w+\[\d*:\d*\]", re.ASCII)


def split_name(split: str | None) -> str | None:
    """Return the name in `name[a:b]`; SourceError if the split is malformed."""
    return None if split is None else _matched(split)[1]


def select_rows(count: int, *, split: str | None, shuffle_seed: int | None, max_samples: int | None) -> Sequence[int]:
    """Return the row numbers to read, of `count` rows, in order.

    First all rows are permuted, by `numpy.random.Generator(numpy.random.PCG64(shuffle_seed)).permutation(count)`
    (None: the order of the data), then the slice is taken, then the first `max_samples`. Slices of one seed that do
    not overlap are therefore disjoint, and slices in percent that meet leave out no row.

    Args:
        count: rows there are.
        split: None, `name` or `name[a:b]`, with a and b left out, whole numbers or percentages (rounded to the
            nearest row), counted from the end if negative. The name is not looked at here.
        shuffle_seed: a non-negative integer or None.
        max_samples: at least 1, or None for all.

    Raises:
        SourceError: an option is malformed, or no row is left.

    """
    chosen = _parse_split(split, count)
    if shuffle_seed is not None and shuffle_seed < 0:
        raise SourceError(f"shuffle seed {shuffle_seed} is negative; expected a non-negative integer or none")
    if max_samples is not None and max_samples < 1:
        raise SourceError(f"max_samples is {max_samples}; expected at least 1, or none for all")
    rows: Sequence[int] = range(count)
    if shuffle_seed is not None:
        # A memoryview is a sequence of ints that slices without a copy, 8 bytes per row.
        rows = memoryview(np.random.Generator(np.random.PCG64(shuffle_seed)).permutation(count))
    rows = rows[chosen][:max_samples]
    if not len(rows):
        raise SourceError(f"split {split!r} selects none of the {count} rows")
    return rows


def select_automodels_rows(
    count: int, *, is_json: bool, split: str | None, shuffle_seed: int | None, max_samples: int | None
) -> Sequence[int]:
    """Return the row numbers that NeMo Automodel's chat dataset reads (as of August 2026), in its order.

    Rows of JSON files are all read as they stand: it looks at neither split nor seed. Of any others it takes
    `name[a:b]` of plain row numbers after the shuffle, which is that of `select_rows`; every other split goes to the
    library `datasets`, which takes its slice before the shuffle, rounds percentages to the nearest row, half to even,
    and takes both bounds for percentages where one is.

    Raises what `select_rows` does.
    """
    if is_json or split is None or _AFTER_AUTOMODELS_SHUFFLE.fullmatch(split):
        _parse_split(split, count)
        given = (None, None) if is_json else (split, shuffle_seed)
        return select_rows(count, split=given[0], shuffle_seed=given[1], max_samples=max_samples)
    rows = range(count)[_slice_of_datasets(split, count)]
    if not rows:
        raise SourceError(f"split {split!r} selects none of the {count} rows")
    order = select_rows(len(rows), split=None, shuffle_seed=shuffle_seed, max_samples=max_samples)
    return memoryview(np.array(order, np.int64) + rows.start)


def _slice_of_datasets(split: str, count: int) -> slice:
    _parse_split(split, count)
    bounds = _matched(split).group(2, 3)
    in_percent = any(bound is not None and bound.endswith("%") for bound in bounds)
    numbers = [None if bound is None else int(bound.removesuffix("%")) for bound in bounds]
    if in_percent:
        numbers = [None if number is None else round(number * count / 100) for number in numbers]
    return slice(*numbers)


def _parse_split(split: str | None, count: int) -> slice:
    if split is None:
        return slice(None)
    match = _matched(split)
    start, stop = (_row(split, bound, count) for bound in match.group(2, 3))
    return slice(start, stop)


def _matched(split: str) -> re.Match[str]:
    match = _SPLIT.fullmatch(split)
    if match is None:
        raise SourceError(
            f"split {split!r} is not understood; expected name[a:b] where a and b are rows or percentages, either of "
            "which may be left out (train[:1000], train[90%:]), or a name or no split for all rows"
        )
    return match


def _row(split: str, bound: str | None, count: int) -> int | None:
    if bound is None:
        return None
    if not bound.endswith("%"):
        return int(bound)
    percent = int(bound[:-1])
    if not -100 <= percent <= 100:
        raise SourceError(f"split {split!r} goes to {bound}; expected at most 100%")
    row = (abs(percent) * count + 50) // 100
    # Of no rows at the end, none; a slice would take -0 for the beginning.
    return row if percent >= 0 else count - row
