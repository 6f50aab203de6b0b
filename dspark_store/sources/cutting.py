"""What becomes of samples that are too long, or in which too little is supervised."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_store.sources.source import SourceError

OVER_LONG = ("truncate", "drop", "split")
SIDES = ("right", "left")

type Piece = tuple[NDArray[np.int32], NDArray[np.uint8]]  # ids and mask, both (length,)


@dataclass(frozen=True, slots=True)
class Cutting:
    """How samples are brought to at most `seq_length` tokens.

    Attributes:
        seq_length: the most tokens of a sample.
        over_long: "truncate" keeps `seq_length` tokens, "drop" leaves the row out, "split" makes consecutive samples
            of it, each `seq_length` long but the last.
        truncation_side: where "truncate" cuts, "right" or "left".
        min_supervised: pieces with fewer supervised tokens, after the cut, are left out.

    """

    seq_length: int
    over_long: str = "truncate"
    truncation_side: str = "right"
    min_supervised: int = 0

    def check(self) -> None:
        """Raise SourceError naming the option that cannot be."""
        if self.seq_length < 1:
            raise SourceError(f"seq_length is {self.seq_length}; expected at least 1")
        if self.over_long not in OVER_LONG:
            raise SourceError(f"over_long is {self.over_long!r}; expected one of {', '.join(OVER_LONG)}")
        if self.truncation_side not in SIDES:
            raise SourceError(f"truncation_side is {self.truncation_side!r}; expected one of {', '.join(SIDES)}")
        if not 0 <= self.min_supervised <= self.seq_length:
            raise SourceError(
                f"min_supervised is {self.min_supervised}; expected 0 to seq_length, which is {self.seq_length}"
            )


@dataclass(frozen=True, slots=True)
class Cut:
    """The pieces of one row.

    Attributes:
        pieces: what is kept.
        truncated: the row was cut.
        split: it was divided.
        dropped: it was left out for its length.
        too_few_supervised: how many pieces were left out since too little of them is supervised.

    """

    pieces: list[Piece]
    truncated: bool = False
    split: bool = False
    dropped: bool = False
    too_few_supervised: int = 0


def cut(ids: NDArray[np.int32], mask: NDArray[np.uint8], cutting: Cutting) -> Cut:
    """Return the pieces of a row's tokens."""
    length = cutting.seq_length
    too_long = len(ids) > length
    if too_long and cutting.over_long == "drop":
        return Cut([], dropped=True)
    if not too_long:
        pieces = [(ids, mask)]
    elif cutting.over_long == "split":
        pieces = [(ids[at : at + length].copy(), mask[at : at + length].copy()) for at in range(0, len(ids), length)]
    else:
        kept = slice(-length, None) if cutting.truncation_side == "left" else slice(length)
        pieces = [(ids[kept].copy(), mask[kept].copy())]
    enough = [piece for piece in pieces if int(piece[1].sum()) >= cutting.min_supervised]
    return Cut(
        enough,
        truncated=too_long and cutting.over_long == "truncate",
        split=len(pieces) > 1,
        too_few_supervised=len(pieces) - len(enough),
    )
