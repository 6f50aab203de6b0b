"""What becomes of samples that are too long, or in which too little is supervised."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_store.sources.options import RowOptions

type Piece = tuple[NDArray[np.int32], NDArray[np.uint8]]  # ids and mask, both (length,)


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


def cut(ids: NDArray[np.int32], mask: NDArray[np.uint8], length: int, options: RowOptions) -> Cut:
    """Return the pieces of a row's tokens, each of at most `length`."""
    too_long = len(ids) > length
    if too_long and options.over_long == "drop":
        return Cut([], dropped=True)
    if not too_long:
        pieces = [(ids, mask)]
    elif options.over_long == "split":
        pieces = [(ids[at : at + length].copy(), mask[at : at + length].copy()) for at in range(0, len(ids), length)]
    else:
        kept = slice(-length, None) if options.truncation_side == "left" else slice(length)
        pieces = [(ids[kept].copy(), mask[kept].copy())]
    enough = [piece for piece in pieces if int(piece[1].sum()) >= options.min_supervised]
    return Cut(
        enough,
        truncated=too_long and options.over_long == "truncate",
        split=len(pieces) > 1,
        too_few_supervised=len(pieces) - len(enough),
    )
