"""Which spans of a corpus are its samples, where a record is a document."""

from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from dspark_store.sources.source import SourceError

type OverLong = Literal["truncate", "drop", "split"]
type Outcome = Literal["whole", "truncated", "split", "dropped", "empty"]
type Span = tuple[int, int]  # positions in the stream of the pair, the second one exclusive


class Plan(Protocol):
    """The samples of a source, numbered in the order in which they are read, and the records that they are of."""

    def __len__(self) -> int:
        """Return the number of records."""
        ...

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        ...

    def lengths(self) -> NDArray[np.int64]:
        """Return the tokens that each record gives."""
        ...

    def spans(self, sample: int) -> list[Span]:
        """Return the spans whose tokens, joined, are a sample."""
        ...

    def records_before(self, sample: int) -> int:
        """Return how many records have given all their samples before this one."""
        ...

    def first_sample(self, record: int) -> int | None:
        """Return the first sample of a record, or None if it gives none."""
        ...

    def outcome(self, record: int) -> Outcome:
        """Return what becomes of a record."""
        ...

    def name(self, record: int) -> str:
        """Return what a record is called in messages."""
        ...


class DocumentPlan:
    """One record a document, which gives one sample, or several where long documents are split.

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

    def __len__(self) -> int:
        """Return the number of documents that are read, the empty ones included."""
        return len(self._kept)

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        return int(self._samples_until[-1])

    def lengths(self) -> NDArray[np.int64]:
        """Return the tokens that each document gives, over all its samples."""
        return self._kept

    def spans(self, sample: int) -> list[Span]:
        """Return the one span of a sample."""
        record = int(np.searchsorted(self._samples_until, sample, side="right"))
        part = sample - (int(self._samples_until[record - 1]) if record else 0)
        start = part * self._seq_length
        stop = min(start + self._seq_length, int(self._kept[record]))
        return [(int(self._starts[record]) + start, int(self._starts[record]) + stop)]

    def records_before(self, sample: int) -> int:
        """Return the documents done before a sample; those without tokens are done with the one before them, if any."""
        return int(np.searchsorted(self._samples_until, sample, side="right"))

    def first_sample(self, record: int) -> int | None:
        """Return the first sample of a document, or None if it is empty or dropped."""
        before = int(self._samples_until[record - 1]) if record else 0
        return before if self._samples_until[record] > before else None

    def outcome(self, record: int) -> Outcome:
        """Return what becomes of a document."""
        tokens, kept = self._tokens[record], self._kept[record]
        if not tokens:
            return "empty"
        if tokens > kept:
            return "truncated" if kept else "dropped"
        return "split" if kept > self._seq_length else "whole"

    def name(self, record: int) -> str:
        """Return which document a record is, counted from 0, for messages."""
        return f"document {self._rows[record]}"
