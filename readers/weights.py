"""Reading the target's embedding and head back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dspark_store.format.arrays import array_checksum, array_keys, object_limit
from dspark_store.format.damage import DamagedStoreError, remedy
from dspark_store.format.dtypes import bits_tensor
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import EMBED, HEAD, HEAD_BIAS
from dspark_store.format.storage import Storage


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """The target's tables in the cache dtype: embedding and head (V, H), and the head's bias (V,) where it has one."""

    embed: torch.Tensor
    head: torch.Tensor
    bias: torch.Tensor | None


def read_weights(storage: Storage, record: StoreRecord) -> TargetWeights:
    """Read and check the target's embedding and head.

    Args:
        storage: the store's place, ``cache.storage``.
        record: its attributes, ``cache.record``.

    Returns:
        The tables in the cache dtype: embedding and head (V, H), and the head's bias (V,) or None.

    Raises:
        FileNotFoundError: the store was written without them.
        DamagedStoreError: they are not the ones that were written.
    """
    for path in (EMBED, HEAD):
        if path not in record.weights:
            raise FileNotFoundError(f"{path} not found in {storage}: the store was written without target weights")
    bias = _read_table(storage, record, HEAD_BIAS) if HEAD_BIAS in record.weights else None
    return TargetWeights(_read_table(storage, record, EMBED), _read_table(storage, record, HEAD), bias)


def _read_table(storage: Storage, record: StoreRecord, path: str) -> torch.Tensor:
    dtype = record.schema.dtype
    spec = record.schema.weights(record.weights[path])
    if array_checksum(storage, path, spec) != record.checksums.get(path):
        raise DamagedStoreError(
            f"target weights {path} of {storage} are not the ones that were written; {remedy(storage)}"
        )
    keys, rows = array_keys(path, spec), spec.chunk[0]
    table = np.empty((len(keys) * rows, *spec.shape[1:]), dtype.stored)
    for index, key in enumerate(keys):
        stored = memoryview(storage.read(key, object_limit(spec)))
        crc = int.from_bytes(stored[-4:], "little")
        spec.chain.decode(stored, table[index * rows : (index + 1) * rows], crc=crc)
    return bits_tensor(table[: spec.shape[0]], dtype.torch_dtype)
