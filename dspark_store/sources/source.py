"""What every source of tokens gives: samples, in an order that can be taken up again, an identity, and a report."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dspark_store.format.jsonvalue import JsonValue


class SourceError(ValueError):
    """A mistake in the data or in the options of a source: one line that names the file and the row in it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The tokens of one sample, without padding.

    Attributes:
        input_ids: int32, shape (length,).
        loss_mask: uint8, shape (length,): 1 where the token itself is supervised. It is not shifted: position `t` of
            the mask speaks about position `t` of the ids.
        cursor: what `Source.read` takes to go on after this sample. It grows from sample to sample and means nothing
            else to a caller.
        origin: which part of a blend the sample is of, counted from 0.

    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    cursor: int
    origin: int = 0


@runtime_checkable
class Resuming(Protocol):
    """A source that wants to know what was read of it before, by a job that ended early."""

    def resume(self, cursor: int, samples: int) -> None:
        """Take note that reading up to a cursor gave so many samples; `read` goes on from there."""
        ...


class Source(Protocol):
    """Where tokens come from. `read` may be called any number of times, from any cursor that a sample came with.

    A source whose records give one sample each uses the number of records passed as the cursor. Who derives from this
    class has one part without a name, and lengths that are not known.
    """

    def identity(self) -> dict[str, JsonValue]:
        """Return what decides the samples, by content and options and never by path."""
        ...

    def __len__(self) -> int:
        """Return the number of records that `read` goes through; the samples may be fewer, or more."""
        ...

    def origins(self) -> tuple[str, ...]:
        """Return the names of the parts that `Sample.origin` counts; one empty name for a source without parts."""
        return ("",)

    def lengths(self) -> NDArray[np.int64] | None:
        """Return the tokens of each record, shape (records,), where they are known without reading, else None."""
        return None

    def read(self, cursor: int = 0) -> Iterator[Sample]:
        """Yield the samples in order, from the cursor (0: the beginning) on.

        Raises:
            ValueError: there is no such cursor.
            SourceError: a record cannot be used.

        """
        ...

    def record_of(self, cursor: int) -> int:
        """Return how many records are passed at a cursor, for progress."""
        ...

    def sample(self, record: int) -> Sample:
        """Return the (first) sample of one record.

        Raises:
            IndexError: there is no such record.
            SourceError: the record cannot be used, or gives no sample.

        """
        ...


EXAMPLES = 3
_PARTICULARS = re.compile(r"'[^']*'|\"[^\"]*\"|\d[\d,]*")


@dataclass(slots=True)
class Refusals:
    """Rows refused for one reason: how many, and the messages of the first three."""

    count: int = 0
    examples: list[str] = field(default_factory=list)


def _counted(fact: str) -> int:
    """Give a field that counts, and how a report names it."""
    counter: int = field(default=0, metadata={"fact": fact})
    return counter


@dataclass(slots=True)
class SourceReport:
    """What became of the rows read so far.

    `read` rows are the kept ones, those left out on purpose (`dropped` for their length, `too_few_supervised`) and
    the `refused` ones. `truncated`, `split`, `unsupervised` and `replaced` speak about kept rows, `empty` about
    refused ones.

    Attributes:
        read: rows read.
        kept: rows that gave at least one sample.
        samples: samples given.
        tokens: tokens in them.
        supervised: supervised tokens in them.
        truncated: rows that were cut.
        split: rows that gave more than one piece.
        dropped: rows left out because they are longer than `seq_length`.
        unsupervised: kept samples without any supervised token.
        too_few_supervised: samples left out because fewer than `min_supervised` of their tokens are supervised.
        replaced: rows in which lone surrogates were replaced by U+FFFD.
        empty: rows that render to no tokens.
        refused: rows that cannot be used.
        reasons: the refusals by kind of message.
        notes: what of rows was left aside, such as a key that is not read, and how many rows have it.

    """

    read: int = _counted("rows read")
    kept: int = _counted("rows kept")
    samples: int = _counted("samples")
    tokens: int = _counted("tokens")
    supervised: int = _counted("supervised tokens")
    truncated: int = _counted("truncated")
    split: int = _counted("split")
    dropped: int = _counted("dropped (too long)")
    unsupervised: int = _counted("unsupervised")
    too_few_supervised: int = _counted("left out (too few supervised)")
    replaced: int = _counted("surrogates replaced")
    empty: int = _counted("empty")
    refused: int = _counted("refused")
    reasons: dict[str, Refusals] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)

    def add_samples(self, masks: Iterable[NDArray[np.uint8]]) -> None:
        """Count samples that are given, by their loss masks."""
        for mask in masks:
            supervised = int(mask.sum())
            self.samples += 1
            self.tokens += len(mask)
            self.supervised += supervised
            self.unsupervised += not supervised

    def note(self, note: str, rows: int = 1) -> bool:
        """Count rows of which something was left aside; return whether it is the first time."""
        self.notes[note] = self.notes.get(note, 0) + rows
        return self.notes[note] == rows

    def refuse(self, where: str, reason: str) -> None:
        """Count a refused row, and keep its message if it is among the first of its kind."""
        self.refused += 1
        refusals = self.reasons.setdefault(_PARTICULARS.sub("…", reason), Refusals())
        refusals.count += 1
        if len(refusals.examples) < EXAMPLES:
            refusals.examples.append(f"{where}: {reason}")

    def lines(self) -> list[str]:
        """Return the report as people read it, a fact a line."""
        facts = [(item.metadata["fact"], getattr(self, item.name)) for item in fields(self) if item.metadata]
        width = max(len(name) for name, _ in facts)
        lines = [f"{name:<{width}}  {count:,}" for name, count in facts]
        lines += [f"{note}: {count:,} rows" for note, count in sorted(self.notes.items())]
        for refusals in sorted(self.reasons.values(), key=lambda refusals: -refusals.count):
            lines.append(f"refused {refusals.count:,}:")
            lines.extend(f"  {example}" for example in refusals.examples)
        return lines


@runtime_checkable
class Reporting(Protocol):
    """A source that tells what became of its records."""

    def report(self) -> SourceReport:
        """Return what became of the records read so far."""
        ...

    def where(self, record: int) -> str:
        """Return the place of a record, for messages."""
        ...
