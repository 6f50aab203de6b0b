"""What rows and tables come to when they are encoded as the writers do it, kept nowhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from dspark_store.format.codecs import CODEC_PRESETS, state_chain
from dspark_store.format.dtypes import bits_tensor, cache_dtype
from dspark_store.format.grid import default_chunk_tokens
from dspark_store.format.schema import ID_FILL, IDS, LAST, MASK, MASK_FILL, StoreSchema

_TABLE_CHUNKS = 16


class Variant(NamedTuple):
    """A way of keeping states: a codec preset, and a cache dtype by name."""

    codec: str
    dtype: str

    def schema(self, schema: StoreSchema, chunk_tokens: int = 0) -> StoreSchema:
        """Return a schema changed to this codec and dtype.

        ``chunk_tokens`` is what the user has asked for, 0 for what goes best with both.
        """
        dtype = cache_dtype(self.dtype)
        if self == Variant(schema.codec, schema.dtype.name) and not chunk_tokens:
            return schema
        best = default_chunk_tokens(
            schema.hidden_size, dtype.itemsize, schema.seq_length, compressed=self.codec != "none"
        )
        return replace(schema, dtype=dtype, codec=self.codec, chunk_tokens=min(chunk_tokens or best, schema.seq_length))


def variants(dtypes: Sequence[str]) -> Iterator[Variant]:
    """Yield each codec preset whose package is there, with each of some cache dtypes."""
    for codec in CODEC_PRESETS:
        for dtype in dtypes:
            try:
                state_chain(codec, cache_dtype(dtype).itemsize)
            except ImportError:
                break
            yield Variant(codec, dtype)


def state_row_bytes(schema: StoreSchema, states: torch.Tensor) -> int:
    """Return the bytes of all chunks of one row, (length, H) of any dtype, in one state object."""
    chain, step, dtype = schema.chain(LAST), schema.chunk_tokens, schema.dtype
    bits = np.empty((step, schema.hidden_size), dtype.bits)
    total = 0
    for begin in range(0, len(states), step):
        piece = states[begin : begin + step]
        bits_tensor(bits, dtype.torch_dtype)[: len(piece)].copy_(piece)
        bits[len(piece) :] = dtype.fill_bits
        total += chain.encode(bits.view(dtype.stored)).nbytes
    return total


def token_row_bytes(schema: StoreSchema, ids: np.ndarray, mask: np.ndarray) -> tuple[int, int]:
    """Return the bytes of one row's chunk of ids and of its chunk of the mask."""
    padded_ids = np.full(schema.seq_length, ID_FILL, "<i4")
    padded_mask = np.full(schema.seq_length, MASK_FILL, "u1")
    padded_ids[: len(ids)], padded_mask[: len(mask)] = ids, mask
    return schema.chain(IDS).encode(padded_ids).nbytes, schema.chain(MASK).encode(padded_mask).nbytes


def table_bytes(schema: StoreSchema, table: torch.Tensor) -> float:
    """Return the bytes of a target table, (V, H) or (V,): exact for small ones, else from chunks at even distances."""
    spec, dtype = schema.weights(tuple(table.shape)), schema.dtype
    rows = spec.chunk[0]
    chunks = -(-len(table) // rows)
    chosen = np.unique(np.linspace(0, chunks - 1, min(chunks, _TABLE_CHUNKS)).round().astype(int)).tolist()
    encoded = covered = 0
    for chunk in chosen:
        piece = table[chunk * rows : (chunk + 1) * rows].detach()
        bits = np.full((rows, *piece.shape[1:]), dtype.fill_bits, dtype.bits)
        bits_tensor(bits, dtype.torch_dtype)[: len(piece)].copy_(piece)
        encoded += spec.chain.encode(bits.view(dtype.stored)).nbytes
        covered += len(piece)
    return encoded * len(table) / covered
