"""Which spans of a corpus are its samples: a plan whose records are documents, and one whose records are windows."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, override

import numpy as np
from numpy.typing import NDArray

from dspark_store.sources.megatron.options import MegatronOptions, OverLong
from dspark_store.sources.megatron.pair import IndexedPair
from dspark_store.sources.megatron.window_cache import cached_indices
from dspark_store.sources.megatron.windows import WindowIndices, WindowSettings, split_units
from dspark_store.sources.row_order import select_rows
from dspark_store.sources.source import SourceError

type Outcome = Literal["whole", "truncated", "split", "dropped", "empty"]
type Span = tuple[int, int]  # positions in the stream of the pair, the second one exclusive


class Plan(ABC):
    """The samples of a source, numbered in the order in which they are read, and the records that they are of.

    Where a plan does not say otherwise, each record gives one sample.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of records."""

    @abstractmethod
    def lengths(self) -> NDArray[np.int64]:
        """Return the tokens that each record gives, over all its samples, int64, shape (records,)."""

    @abstractmethod
    def spans(self, sample: int) -> list[Span]:
        """Return the spans whose tokens, joined, are a sample."""

    @abstractmethod
    def name(self, record: int) -> str:
        """Return what a record is called in messages; numbers count from 0."""

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        return len(self)

    def records_before(self, sample: int) -> int:
        """Return how many records are done before a sample; those without tokens are with the one before them."""
        return sample

    def first_sample(self, record: int) -> int | None:
        """Return the first sample of a record, or None if it gives none."""
        return record

    def outcome(self, record: int) -> Outcome:
        """Return what becomes of a record."""
        return "whole"


class DocumentPlan(Plan):
    """One record per document, which gives one sample, or several where long documents are split.

    Documents without tokens give none. Everything follows from the lengths; no token is read.
    """

    def __init__(
        self, starts: NDArray[np.int64], rows: NDArray[np.int64], seq_length: int, over_long: OverLong
    ) -> None:
        """Lay out the samples.

        Args:
            starts: int64, shape (documents + 1,): position in the stream at which each document starts.
            rows: int64, shape (records,): the documents to read, in order.
            seq_length: the longest sample.
            over_long: what becomes of longer documents. "truncate": their first `seq_length` tokens. "drop": nothing.
                "split": consecutive samples of `seq_length` tokens, the last one shorter.

        Raises:
            SourceError: an option is not understood, or no document gives a sample.

        """
        if over_long not in get_args(OverLong.__value__):
            raise SourceError(f"over_long is {over_long!r}; expected one of {', '.join(get_args(OverLong.__value__))}")
        self._starts = starts[rows]
        tokens = starts[rows + 1] - self._starts
        self._rows, self._tokens = rows, tokens
        self._kept = tokens
        if over_long == "truncate":
            self._kept = np.minimum(tokens, seq_length)
        elif over_long == "drop":
            self._kept = np.where(tokens > seq_length, 0, tokens)
        self._seq_length = seq_length
        self._samples_until = np.cumsum(-(-self._kept // seq_length))  # by the end of each record
        if not self.num_samples:
            raise SourceError(
                f"none of the {len(rows)} documents gives a sample: all are empty"
                + (f" or longer than {seq_length} tokens, which drops them" if over_long == "drop" else "")
            )

    @override
    def __len__(self) -> int:
        return len(self._kept)

    @property
    @override
    def num_samples(self) -> int:
        return int(self._samples_until[-1])

    @override
    def lengths(self) -> NDArray[np.int64]:
        return self._kept

    @override
    def spans(self, sample: int) -> list[Span]:
        record = int(np.searchsorted(self._samples_until, sample, side="right"))
        part = sample - (int(self._samples_until[record - 1]) if record else 0)
        start = part * self._seq_length
        stop = min(start + self._seq_length, int(self._kept[record]))
        return [(int(self._starts[record]) + start, int(self._starts[record]) + stop)]

    @override
    def records_before(self, sample: int) -> int:
        return int(np.searchsorted(self._samples_until, sample, side="right"))

    @override
    def first_sample(self, record: int) -> int | None:
        before = int(self._samples_until[record - 1]) if record else 0
        return before if self._samples_until[record] > before else None

    @override
    def outcome(self, record: int) -> Outcome:
        tokens, kept = self._tokens[record], self._kept[record]
        if not tokens:
            return "empty"
        if tokens > kept:
            return "truncated" if kept else "dropped"
        return "split" if kept > self._seq_length else "whole"

    @override
    def name(self, record: int) -> str:
        return f"document {self._rows[record]}"


@dataclass(frozen=True, slots=True)
class WindowPlan(Plan):
    """One record and one sample per window, in the order of the shuffle index.

    Attributes:
        indices: of the windows over the units.
        settings: what they were built from.
        starts: int64, shape (units,): position in the stream at which each unit starts.
        unit_lengths: int64, shape (units,): tokens in each unit.
        rows: places in the shuffle index that are read.
        sample_tokens: the longest sample: the window, and the token after it where that is carried.

    """

    indices: WindowIndices
    settings: WindowSettings
    starts: NDArray[np.int64]
    unit_lengths: NDArray[np.int64]
    rows: range
    sample_tokens: int

    @override
    def __len__(self) -> int:
        return len(self.rows)

    def lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each window; only the last one of the corpus can be shorter than the others."""
        lengths = np.full(len(self.rows), self.sample_tokens, np.int64)
        if self.settings.keep_partial and len(self.indices.sample) > 1:
            served = self.indices.shuffle[self.rows.start : self.rows.stop]
            last = np.flatnonzero(served == len(self.indices.sample) - 2)
            lengths[last] = [sum(stop - start for start, stop in self.spans(int(row))) for row in last]
        return lengths

    @override
    def spans(self, sample: int) -> list[Span]:
        room = self.sample_tokens
        spans: list[Span] = []
        extra = int(self.settings.extra_token)
        for unit, start, stop in self.indices.pieces(self.rows[sample], self.unit_lengths, extra=extra):
            taken = min(stop - start, room)
            if taken:
                first = int(self.starts[unit]) + start
                spans.append((first, first + taken))
            room -= taken
        return spans

    @override
    def name(self, record: int) -> str:
        return f"window {self.rows[record]}"


def plan_documents(
    pair: IndexedPair,
    over_long: OverLong,
    seq_length: int,
    split: str | None,
    shuffle_seed: int | None,
    max_samples: int | None,
) -> DocumentPlan:
    """Return the documents of a pair, as `select_rows` takes them; SourceError if an option cannot be used."""
    starts = pair.document_starts()
    try:
        rows = select_rows(len(starts) - 1, split=split, shuffle_seed=shuffle_seed, max_samples=max_samples)
        chosen = np.arange(rows.start, rows.stop, dtype=np.int64) if isinstance(rows, range) else np.asarray(rows)
        return DocumentPlan(starts, chosen, seq_length, over_long)
    except SourceError as error:
        raise SourceError(f"{pair.paths.prefix}: {error}") from error


def plan_windows(
    pair: IndexedPair,
    options: MegatronOptions,
    settings: WindowSettings,
    split: str | None,
    max_samples: int | None,
) -> WindowPlan:
    """Return the windows of a pair: of its sequences, each a unit, or by hyper-parallel's rule of its documents.

    `split` takes a slice of them, in the order in which they are served.

    Raises:
        SourceError: an option cannot be used, or there is no window.

    """
    starts = pair.starts if settings.rule == "megatron" else pair.document_starts()
    if options.parts is not None:
        first, last = split_units(len(starts) - 1, options.parts, options.part)
        starts = starts[first : last + 1]
    lengths = np.diff(starts)
    try:
        indices = cached_indices(lengths, settings, _cache_directory(pair, options))
    except SourceError as error:
        raise SourceError(f"{pair.paths.prefix}: {error}") from error
    count = len(indices.shuffle)
    if not count:
        raise SourceError(
            f"{pair.paths.prefix}: {int(lengths.sum())} tokens are less than a window of {settings.window} and the "
            "token after it; make the window smaller, or set num_samples, for which the corpus is repeated"
        )
    rows = range(count)[_chosen(count, split, max_samples)]
    return WindowPlan(indices, settings, starts[:-1], lengths, rows, settings.window + int(options.carries))


def _chosen(count: int, split: str | None, max_samples: int | None) -> slice:
    rows = select_rows(count, split=split, shuffle_seed=None, max_samples=max_samples)
    return slice(rows[0], rows[-1] + 1)


def _cache_directory(pair: IndexedPair, options: MegatronOptions) -> Path | None:
    if not options.cache:
        return None
    if options.cache_dir is not None:
        return Path(options.cache_dir)
    return pair.paths.prefix.with_name(pair.paths.prefix.name + ".windows")
