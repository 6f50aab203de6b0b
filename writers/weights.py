"""The target's embedding and head, kept in the store so that training never loads the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from dspark_store.format.arrays import array_checksum, array_keys
from dspark_store.format.dtypes import tensor_bits
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import EMBED, HEAD, HEAD_BIAS, ArraySpec
from dspark_store.format.storage import Storage


def write_weights(
    storage: Storage,
    record: StoreRecord,
    embed: torch.Tensor,
    head: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tied: bool,
) -> StoreRecord:
    """Write the embedding (V, H), the head (V, H) and its bias (V,), cast to the cache dtype.

    A tied head is linked to the embedding's objects. Returns the record with shapes and checksums added; the caller
    writes the metadata.
    """
    tables: dict[str, torch.Tensor] = {EMBED: embed}
    if not tied:
        tables[HEAD] = head
    if bias is not None:
        tables[HEAD_BIAS] = bias
    shapes = {path: tuple(table.shape) for path, table in tables.items()}
    if tied:
        shapes[HEAD] = shapes[EMBED]
    specs = {path: record.schema.weights(shape) for path, shape in shapes.items()}
    for path, table in tables.items():
        _write_table(storage, record, path, specs[path], table)
    if tied:
        for source, key in zip(array_keys(EMBED, specs[EMBED]), array_keys(HEAD, specs[HEAD]), strict=True):
            storage.link(source, key)
    checksums = {path: array_checksum(storage, path, spec) for path, spec in specs.items()}
    return replace(record, weights=_as_lists(shapes)).with_checksums(checksums)


def _as_lists(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[int]]:
    return {path: list(shape) for path, shape in sorted(shapes.items())}


def _write_table(storage: Storage, record: StoreRecord, path: str, spec: ArraySpec, table: torch.Tensor) -> None:
    dtype, rows = record.schema.dtype, spec.chunk[0]
    for index, key in enumerate(array_keys(path, spec)):
        piece = table[index * rows : (index + 1) * rows].detach().to(dtype.torch_dtype).cpu()
        whole = torch.full((rows, *piece.shape[1:]), float("nan"), dtype=dtype.torch_dtype)
        bits = tensor_bits(whole)
        bits[...] = dtype.fill_bits
        bits[: len(piece)] = tensor_bits(piece.contiguous())
        encoded = spec.chain.encode(bits.view(dtype.stored))
        storage.put(key, bytes(encoded.payload) + encoded.crc_bytes())
