"""The shapes of a batch's tensors, and the view of them that the fetcher fills."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from dspark_store.format.schema import IDS, LAST, MASK, StoreSchema

type Layout = Literal["flat", "stacked"]
"""Of ``target_hidden_states``: "flat" is (B, S, K*H), "stacked" (B, K, S, H), in which chunks land in one piece."""


def batch_shape(
    schema: StoreSchema, column: str, batch: int, layers: int, length: int, layout: Layout
) -> tuple[int, ...]:
    """Return the shape of a column of a batch of ``length`` positions; ValueError for an unknown layout."""
    if layout not in ("flat", "stacked"):
        raise ValueError(f"the layout is {layout!r}; choose from flat, stacked")
    width = schema.hidden_size
    if column in (IDS, MASK):
        return batch, length
    if column == LAST:
        return batch, length, width
    return (batch, layers, length, width) if layout == "stacked" else (batch, length, layers * width)


def column_dtype(schema: StoreSchema, column: str) -> torch.dtype:
    """Return the dtype of a column of a batch."""
    return torch.int64 if column in (IDS, MASK) else schema.dtype.torch_dtype


def batch_tensor(schema: StoreSchema, column: str, shape: tuple[int, ...], given: torch.Tensor | None) -> torch.Tensor:
    """Return the tensor to fill for a column: ``given``, or a new one. ValueError when the given one does not fit."""
    dtype = column_dtype(schema, column)
    if given is None:
        return torch.empty(shape, dtype=dtype)
    if tuple(given.shape) != shape or given.dtype != dtype or given.device.type != "cpu":
        raise ValueError(f"out[{column!r}] must be {shape} {dtype} on the CPU, got {tuple(given.shape)} {given.dtype}")
    if _overlaps_itself(given):
        raise ValueError(
            f"out[{column!r}] keeps several elements in the same memory (strides {given.stride()}), as an expanded "
            "tensor does: give one whose elements are apart, such as a clone"
        )
    return given


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < extent:
                return True
            extent += stride * (size - 1)
    return False


def state_view(column: str, target: torch.Tensor, schema: StoreSchema) -> np.ndarray:
    """View a state tensor as stored values, (B, K, positions, H), whatever its layout."""
    if column == LAST:
        target = target.unsqueeze(1)
    elif target.ndim == 3:
        width = schema.hidden_size
        target = target.view(*target.shape[:2], target.shape[2] // width, width).transpose(1, 2)
    bits = target.view(torch.int16 if target.dtype.itemsize == 2 else torch.int32).numpy()
    return bits.view(schema.dtype.stored)
