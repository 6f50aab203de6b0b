"""The tensors of a batch, side by side in one block of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dspark_store.format.schema import StoreSchema
from dspark_store.readers.blocks import BlockPool
from dspark_store.readers.shapes import Layout, batch_shape, column_dtype

_ALIGNMENT = 64


class BatchMemory:
    """Gives out the tensors of batches: the chosen ``columns``, with ``layers`` captured layers in a ``layout``."""

    def __init__(self, schema: StoreSchema, columns: Sequence[str], layers: int, layout: Layout) -> None:
        self._schema = schema
        self._columns = tuple(columns)
        self._layers = layers
        self._layout: Layout = layout
        self._blocks = BlockPool(0)
        self._tensors(0, 0)  # refuses an unknown layout

    def open(self, limit_bytes: int) -> None:
        """Start over with a pool of blocks that takes at most ``limit_bytes``; see `BlockPool`."""
        self._blocks.close()
        self._blocks = BlockPool(limit_bytes)

    def close(self) -> None:
        """Let go of the blocks that no batch uses."""
        self._blocks.close()

    def nbytes(self, rows: int, length: int) -> int:
        """Return the memory that a batch of ``rows`` rows of ``length`` positions takes."""
        return BlockPool.block_bytes(sum(_padded(nbytes) for _, _, nbytes in self._tensors(rows, length)))

    def lease(self, rows: int, length: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a batch, of any content. Their block is used again once none of them is left."""
        block = self._blocks.lease(self.nbytes(rows, length))
        batch: dict[str, torch.Tensor] = {}
        offset = 0
        for column, shape, nbytes in self._tensors(rows, length):
            batch[column] = block[offset : offset + nbytes].view(column_dtype(self._schema, column)).view(shape)
            offset += _padded(nbytes)
        return batch

    def _tensors(self, rows: int, length: int) -> list[tuple[str, tuple[int, ...], int]]:
        tensors = []
        for column in self._columns:
            shape = batch_shape(self._schema, column, rows, self._layers, length, self._layout)
            tensors.append((column, shape, math.prod(shape) * column_dtype(self._schema, column).itemsize))
        return tensors


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
