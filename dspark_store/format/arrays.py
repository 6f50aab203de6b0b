"""Arrays without shards, such as the index and the target's tables: their objects, and a digest over them."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from crc32c import crc32c

from dspark_store.format.codecs import CRC_BYTES, Plain
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.schema import ArraySpec
from dspark_store.format.storage import Storage

DIGEST_BYTES = 16
_OVERHEAD = 4096  # headers of a compressor, whose result on what it cannot compress is little larger


def pack_array(values: np.ndarray) -> bytes:
    """Return the stored object of a small array: its little-endian bytes and their crc32c."""
    payload = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
    return payload + crc32c(payload).to_bytes(4, "little")


def unpack_array(stored: bytes, dtype: str, shape: tuple[int, ...], key: str) -> np.ndarray:
    """Read a small array's object back, read-only; DamagedStoreError naming ``key`` when size or checksum is wrong."""
    expected = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if len(stored) != expected + 4:
        raise DamagedStoreError(f"object {key} has {len(stored)} bytes, expected {expected + 4}")
    payload = stored[:-4]
    if crc32c(payload) != int.from_bytes(stored[-4:], "little"):
        raise DamagedStoreError(f"object {key} fails its checksum")
    return np.frombuffer(payload, np.dtype(dtype).newbyteorder("<")).reshape(shape)


def array_keys(path: str, spec: ArraySpec) -> list[str]:
    """Return the keys of an unsharded array's objects; only its first axis is split."""
    zeros = ".0" * (len(spec.shape) - 1)
    return [f"{path}/c.{index}{zeros}" for index in range(-(-spec.shape[0] // spec.chunk[0]))]


def object_limit(spec: ArraySpec) -> int:
    """Return the most bytes that one object of an unsharded array can have."""
    raw = math.prod(spec.chunk) * np.dtype(spec.data_type).itemsize
    return raw + CRC_BYTES if isinstance(spec.chain.compressor, Plain) else 2 * raw + _OVERHEAD


def array_checksum(storage: Storage, path: str, spec: ArraySpec) -> str:
    """Return the digest over an unsharded array's stored objects, in order; DamagedStoreError when one is missing."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for key in array_keys(path, spec):
        try:
            state.update(storage.read(key, object_limit(spec)))
        except FileNotFoundError as error:
            raise DamagedStoreError(f"object {key} is missing from {storage}") from error
    return state.hexdigest()
