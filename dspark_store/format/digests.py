"""Digests of content: of a sample's tokens, of a shard's, of a small array's objects."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.schema import ArraySpec
from dspark_store.format.storage import Storage

DIGEST_BYTES = 16


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


def array_checksum(storage: Storage, path: str, spec: ArraySpec) -> str:
    """Return the digest over an unsharded array's stored objects, in order; DamagedStoreError when one is missing."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for key in array_keys(path, spec):
        try:
            state.update(storage.read(key))
        except FileNotFoundError as error:
            raise DamagedStoreError(f"object {key} is missing from {storage}") from error
    return state.hexdigest()
