"""What a block may attend to: context before its anchor, and itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from dspark_store.draft.anchors import Anchors

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

DENSE_SLOTS = 128
"""Up to so many slots a row, those of one of flex attention's blocks, a dense mask is small and nothing is compiled."""


def dense_mask(anchors: Anchors, block_size: int, context: int, documents: Tensor | None = None) -> Tensor:
    """Return (B, 1, N * K, S + N * K) bool: whether a slot sees a context position or another slot.

    A block sees the context at positions below its anchor, in the same one of ``documents`` (B, S) where rows are
    packed, and all of its own slots. A block that is not kept sees itself only, so that no row is empty.
    """
    device = anchors.positions.device
    positions = torch.arange(context, device=device)
    before = (positions < anchors.positions[:, :, None]) & anchors.kept[:, :, None]
    if documents is not None:
        before &= documents[:, None] == torch.gather(documents, 1, anchors.positions)[:, :, None]
    rows, blocks = anchors.positions.shape
    own = torch.eye(blocks, dtype=torch.bool, device=device).repeat_interleave(block_size, dim=1)
    sees = torch.cat([before, own.expand(rows, -1, -1)], dim=2)
    return sees.repeat_interleave(block_size, dim=1)[:, None]


def flex_mask(anchors: Anchors, block_size: int, context: int, documents: Tensor | None = None) -> BlockMask:
    """Return the mask of `dense_mask` for flex attention, which never makes it whole; nor does this on CUDA."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows, blocks = anchors.positions.shape
    device = anchors.positions.device
    document_of = None if documents is None else torch.gather(documents, 1, anchors.positions)

    def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // block_size
        place = key.clamp(max=context - 1)
        before = (key < context) & (key < anchors.positions[row, block]) & anchors.kept[row, block]
        if documents is not None and document_of is not None:
            before &= documents[row, place] == document_of[row, block]
        return before | ((key >= context) & ((key - context) // block_size == block))

    slots = blocks * block_size
    create = _compiled_create_block_mask() if device.type == "cuda" else create_block_mask
    return create(sees, rows, None, slots, context + slots, device=device)


@cache
def _compiled_create_block_mask() -> Callable[..., BlockMask]:
    """Uncompiled it makes the mask whole first, a byte for each slot and position; once, for batches of all lengths."""
    from torch.nn.attention.flex_attention import create_block_mask

    return cast("Callable[..., BlockMask]", torch.compile(create_block_mask, dynamic=True))
