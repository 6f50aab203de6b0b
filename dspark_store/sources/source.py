"""What every source of tokens gives: samples, in an order that can be taken up again, and an identity."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dspark_store.format.jsonvalue import JsonValue


class SourceError(ValueError):
    """A mistake in the data or in the options of a source: one line that names the file and the line in it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The tokens of one record, without padding.

    Attributes:
        input_ids: int32, shape (length,).
        loss_mask: uint8, shape (length,): 1 where the token itself is supervised. It is not shifted: position `t` of
            the mask speaks about position `t` of the ids.

    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]


class Source(Protocol):
    """Where tokens come from. `read` may be called any number of times; the position of a record is the cursor."""

    def identity(self) -> dict[str, JsonValue]:
        """Return what decides the samples, by content and never by path."""
        ...

    def __len__(self) -> int:
        """Return the number of records that `read` goes through."""
        ...

    def read(self, start: int = 0) -> Iterator[Sample]:
        """Yield one sample for each record from `start` to the end, in order."""
        ...
