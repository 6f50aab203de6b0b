"""Bytes of a store: by column and layer, of its other files, and what its states would take elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark_store.format.ledger import counted_objects
from dspark_store.format.schema import IDS, LAST, LAYERS, MASK, TOKEN_OBJECTS, StoreSchema
from dspark_store.format.sizes import padded_bytes, ragged_rows_bytes

_TOKEN_BYTES = {IDS: 4, MASK: 1}


@dataclass(frozen=True, slots=True)
class ColumnSize:
    """Bytes of a column, or of the layer ``layer_id`` in it.

    ``logical_bytes`` are its values at valid positions before compression, None when the lengths are unknown,
    ``padded_bytes`` those at all S positions. Values that stand in an object of `target_last_hidden_states` too count
    there alone: of such a layer, which is ``shared``, both are 0.
    """

    name: str
    layer_id: int | None
    logical_bytes: int | None
    padded_bytes: int
    stored_bytes: int
    ratio: float | None
    shared: bool = False


@dataclass(frozen=True, slots=True)
class OtherLayouts:
    """What the samples whose states are there take, and what rivals would take for them.

    ``stored_bytes`` is all of their columns. ``padded_bytes``: NeMo Automodel's safetensors shards, K + 1 vectors at
    all S positions, ids and mask as int64. ``ragged_bytes``: rows of K + 1 vectors, ids as int32 and mask as a byte, at
    valid positions only. Both in the cache dtype and without compression; the ratios are their bytes by ours.
    """

    samples: int
    tokens: int
    stored_bytes: int
    padded_bytes: int
    padded_ratio: float | None
    ragged_bytes: int
    ragged_ratio: float | None


@dataclass(frozen=True, slots=True)
class ShardRows:
    """Ledger rows of some shards, (n, objects, 2), and what those shards hold: samples (n,), and tokens (n,) if known.

    ``factor`` is by how much more all shards of the kind hold, 1.0 where no row was left out.
    """

    rows: np.ndarray
    samples: np.ndarray
    tokens: np.ndarray | None
    factor: float


def token_sizes(schema: StoreSchema, shards: ShardRows) -> list[ColumnSize]:
    """Return the sizes of ids and mask."""
    samples = int(shards.samples.sum())
    tokens = None if shards.tokens is None else int(shards.tokens.sum())
    return [
        _size(
            name,
            None,
            int(shards.rows[:, TOKEN_OBJECTS.index(name), 0].sum()),
            None if tokens is None else tokens * itemsize,
            samples * schema.seq_length * itemsize,
            shards.factor,
        )
        for name, itemsize in _TOKEN_BYTES.items()
    ]


def layer_sizes(schema: StoreSchema, shards: ShardRows) -> list[ColumnSize]:
    """Return the sizes of every captured layer, in slot order, and then of the last hidden states."""
    vector = schema.hidden_size * schema.dtype.itemsize
    counted = counted_objects(shards.rows)
    stored = np.where(counted, shards.rows[:, :, 0], np.uint64(0)).sum(axis=0)
    samples = (shards.samples[:, None] * counted).sum(axis=0)
    tokens = None if shards.tokens is None else (shards.tokens[:, None] * counted).sum(axis=0)
    return [
        _size(
            item.column,
            item.layer_id,
            int(stored[position]),
            None if tokens is None else int(tokens[position]) * vector,
            int(samples[position]) * schema.seq_length * vector,
            shards.factor,
            shared=bool(len(counted)) and not counted[:, position].any(),
        )
        for position, item in enumerate(schema.state_objects)
    ]


def column_sizes(parts: Sequence[ColumnSize]) -> list[ColumnSize]:
    """Return the sizes of the two columns of states, from those of `layer_sizes`."""
    return [total_size(name, [part for part in parts if part.name == name]) for name in (LAYERS, LAST)]


def compare(schema: StoreSchema, samples: int, tokens: int, stored: int) -> OtherLayouts:
    """Compare ``stored`` bytes, of samples whose states are there, with what rivals take for them."""
    padded, ragged = padded_bytes(schema, samples), ragged_rows_bytes(schema, tokens)
    return OtherLayouts(samples, tokens, stored, padded, _ratio(padded, stored), ragged, _ratio(ragged, stored))


def total_size(name: str, parts: Sequence[ColumnSize]) -> ColumnSize:
    """Return the sizes of some columns or layers together, under one name."""
    logical = [part.logical_bytes for part in parts if part.logical_bytes is not None]
    known = len(logical) == len(parts)
    stored = sum(part.stored_bytes for part in parts)
    return _size(name, None, stored, sum(logical) if known else None, sum(part.padded_bytes for part in parts), 1.0)


def _size(
    name: str,
    layer_id: int | None,
    stored: int,
    logical: int | None,
    padded: int,
    factor: float,
    *,
    shared: bool = False,
) -> ColumnSize:
    ratio = None if logical is None else _ratio(logical, stored)
    whole = None if logical is None else round(logical * factor)
    return ColumnSize(name, layer_id, whole, round(padded * factor), round(stored * factor), ratio, shared)


def _ratio(bytes_there: int, stored: int) -> float | None:
    return bytes_there / stored if stored else None
