"""Rows that are tokens already."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.source import SourceError

IGNORED = -100
_LARGEST_ID = 2**31 - 1


def read_tokens(row: Mapping[str, JsonValue], vocab_size: int | None) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Return the `input_ids` of a row, int32, and its loss mask, uint8, both of shape (length,).

    The mask is the row's `loss_mask` (0 or 1, or booleans), or 1 where its `labels` are not -100, or 1 everywhere if
    it has neither. Labels are those of transformers: not shifted, so that where they are not -100 they are the ids.

    Args:
        row: the row.
        vocab_size: ids must be below it, if given.

    Raises:
        SourceError: a field has another form, the lengths differ, an id is outside of the vocabulary, or the row is
            padded (its `attention_mask` has zeros).

    """
    ids = _integers(row["input_ids"], "input_ids")
    limit = _LARGEST_ID if vocab_size is None else vocab_size - 1
    outside = np.flatnonzero((ids < 0) | (ids > limit))
    if len(outside):
        raise SourceError(f"input_ids[{outside[0]}] is {ids[outside[0]]}, expected 0 to {limit}")
    attention = _field(row, "attention_mask", len(ids))
    if attention is not None and not attention.all():
        raise SourceError("attention_mask has zeros: the row is padded; give rows without padding")
    mask = _field(row, "loss_mask", len(ids))
    labels = _field(row, "labels", len(ids))
    if mask is not None and not np.isin(mask, (0, 1)).all():
        raise SourceError(f"loss_mask holds {mask[~np.isin(mask, (0, 1))][0]}, expected 0 and 1")
    if mask is None and labels is not None:
        mask = (labels != IGNORED).astype(np.int64)
        different = np.flatnonzero((mask == 1) & (labels != ids))
        if len(different):
            at = different[0]
            raise SourceError(
                f"labels[{at}] is {labels[at]} and input_ids[{at}] is {ids[at]}; expected the same or {IGNORED} "
                "(labels are not shifted)"
            )
    if mask is None:
        mask = np.ones(len(ids), dtype=np.int64)
    return ids.astype(np.int32), mask.astype(np.uint8)


def _field(row: Mapping[str, JsonValue], name: str, length: int) -> NDArray[np.int64] | None:
    if row.get(name) is None:
        return None
    values = _integers(row[name], name)
    if len(values) != length:
        raise SourceError(f"{name} has {len(values)} values and input_ids {length}; expected as many")
    return values


def _integers(values: JsonValue, name: str) -> NDArray[np.int64]:
    if not isinstance(values, list):
        raise SourceError(f"{name} must be a list of integers, got {type(values).__name__}")
    for index, value in enumerate(values):
        if not isinstance(value, int):
            raise SourceError(f"{name}[{index}] must be an integer, got {value!r:.60}")
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError as error:
        raise SourceError(f"{name} holds a number of more than 64 bits") from error
