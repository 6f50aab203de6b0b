"""What every source of tokens gives: samples, in an order that can be taken up again, and an identity."""

from collections.abc import Iterator
from dataclasses import dataclass
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

    A source whose records give one sample each uses the number of records passed as the cursor.
    """

    def identity(self) -> dict[str, JsonValue]:
        """Return what decides the samples, by content and options and never by path."""
        ...

    def __len__(self) -> int:
        """Return the number of records that `read` goes through; the samples may be fewer, or more."""
        ...

    def origins(self) -> tuple[str, ...]:
        """Return the names of the parts that `Sample.origin` counts; one empty name for a source without parts."""
        ...

    def lengths(self) -> NDArray[np.int64] | None:
        """Return the tokens of each record, shape (records,), where they are known without reading, else None."""
        ...

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
