"""Digests of content: of a sample's tokens, of a shard's, of a small array's objects."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import numpy as np

from dspark_store.format.codecs import CRC_BYTES, Plain
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.schema import ArraySpec
from dspark_store.format.storage import Storage

DIGEST_BYTES = 16
_OVERHEAD = 4096  # headers of a compressor, whose result on what it cannot compress is little larger


def sample_digest(input_ids: np.ndarray, loss_mask: np.ndarray) -> bytes:
    """Return the digest of a sample: blake2b-128 over its ids (little-endian int32), then its mask (uint8)."""
    state = hashlib.blake2b(np.ascontiguousarray(input_ids, "<i4").tobytes(), digest_size=DIGEST_BYTES)
    state.update(np.ascontiguousarray(loss_mask, np.uint8).tobytes())
    return state.digest()


def shard_digest(samples: Iterable[bytes]) -> str:
    """Return the digest of a shard's tokens: blake2b-128 over its samples' digests, in order, in hexadecimal."""
    return hashlib.blake2b(b"".join(samples), digest_size=DIGEST_BYTES).hexdigest()


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
