"""What a reader has whole: lengths, supervision, status, the ledger's rows; and the target's tables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from dspark_store.format.arrays import array_checksum, array_keys, object_limit, unpack_array
from dspark_store.format.damage import DamagedStoreError, remedy
from dspark_store.format.dtypes import bits_tensor
from dspark_store.format.ledger import counted_objects, state_ledger, token_ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import (
    EMBED,
    HEAD,
    HEAD_BIAS,
    INDEX_DIGEST,
    INDEX_LENGTH,
    INDEX_OBJECTS,
    INDEX_SOURCE,
    INDEX_STATUS,
    INDEX_SUPERVISED,
    STATE_LEDGER,
    STATUS_FILL,
    TOKEN_LEDGER,
    TOKEN_OBJECTS,
    ArraySpec,
)
from dspark_store.format.shard import ObjectRecord
from dspark_store.format.storage import Storage

if TYPE_CHECKING:  # whose torch takes seconds
    import torch


class StoreIndex:
    """Index arrays of one store, each read and checked when it is first asked for."""

    def __init__(self, storage: Storage, record: StoreRecord) -> None:
        self._storage = storage
        self._record = record
        self._rows: dict[tuple[str, int], np.ndarray] = {}

    @cached_property
    def length(self) -> np.ndarray:
        """(N,) int32: tokens of each sample, from 0 to S: no range of positions is longer than a row."""
        return self._within(INDEX_LENGTH, self._record.schema.seq_length)

    @cached_property
    def supervised(self) -> np.ndarray:
        """(N,) int32: supervised tokens of each sample, from 0 to its length."""
        return self._within(INDEX_SUPERVISED, self.length)

    @cached_property
    def digest(self) -> np.ndarray:
        """(N, 2) uint64: each sample's digest of ids and mask."""
        return self._token_index(INDEX_DIGEST)

    @cached_property
    def source(self) -> np.ndarray:
        """(N,) uint16: the number of each sample's source, 0 throughout in a store of one; names are in the schema."""
        schema = self._record.schema
        if not schema.sources:
            return np.broadcast_to(np.uint16(0), (schema.num_samples,))
        source = self._token_index(INDEX_SOURCE)
        if self._record.phase != "tokens" and (source >= len(schema.sources)).any():
            raise DamagedStoreError(f"index array {INDEX_SOURCE} of {self._storage} names no source of the store")
        return source

    @cached_property
    def status(self) -> np.ndarray:
        """(N,) uint8: 0 good, 1 non-finite; 255 throughout while the store is growing."""
        if not self._record.complete:
            return np.broadcast_to(np.uint8(STATUS_FILL), (self._record.schema.num_samples,))
        return self._read(INDEX_STATUS, self._record.schema.final_index()[INDEX_STATUS])

    @cached_property
    def objects(self) -> np.ndarray:
        """(shards, 3+K+1, 2) uint64: size and digest of every object of a complete store, both ledgers' rows joined."""
        return self._read(INDEX_OBJECTS, self._record.schema.final_index()[INDEX_OBJECTS])

    def committed(self) -> list[int]:
        """Return the shards that can be read, ascending; one listing while the store is growing."""
        schema = self._record.schema
        if self._record.complete:
            return list(range(schema.tokens.num_shards))
        if self._record.phase == "tokens":
            return []
        shards = state_ledger(self._storage, schema).committed()
        return [shard for shard in shards if shard < schema.tokens.num_shards]

    @cached_property
    def _shared(self) -> frozenset[tuple[int, int]]:
        shared = ~counted_objects(self.objects[:, len(TOKEN_OBJECTS) :])
        return frozenset(zip(*(axis.tolist() for axis in np.nonzero(shared)), strict=True))

    def is_shared(self, shard: int, slot: int) -> bool:
        """Tell whether a layer slot's object is that of the last hidden states: same size, same digest.

        Always False while the store is incomplete.
        """
        return self._record.complete and (shard, slot) in self._shared

    def object_record(self, shard: int, position: int) -> ObjectRecord:
        """Return the ledger's row of an object: its position counts the token objects first, then the state objects.

        FileNotFoundError when the shard of a growing store is not committed.
        """
        if self._record.complete:
            nbytes, digest = self.objects[shard, position]
            return ObjectRecord(int(nbytes), int(digest))
        tokens = len(TOKEN_OBJECTS)
        path = TOKEN_LEDGER if position < tokens else STATE_LEDGER
        nbytes, digest = self._ledger_row(path, shard)[position if position < tokens else position - tokens]
        return ObjectRecord(int(nbytes), int(digest))

    def _ledger_row(self, path: str, shard: int) -> np.ndarray:
        if (path, shard) not in self._rows:
            tokens = path == TOKEN_LEDGER
            ledger = token_ledger(self._storage) if tokens else state_ledger(self._storage, self._record.schema)
            self._rows[path, shard] = ledger.row(shard)
        return self._rows[path, shard]

    def _within(self, path: str, most: int | np.ndarray) -> np.ndarray:
        """Return a token index; DamagedStoreError when it holds a number below 0 or past ``most``."""
        values = self._token_index(path)
        outside = (values < 0) | (values > most)
        if outside.any():
            sample = int(outside.argmax())
            raise DamagedStoreError(
                f"index array {path} of {self._storage} holds {values[sample]:,} for sample {sample}, which is out of "
                f"range; {remedy(self._storage)}"
            )
        return values

    def _token_index(self, path: str) -> np.ndarray:
        spec = self._record.schema.token_index()[path]
        if self._record.phase == "tokens":
            return np.broadcast_to(np.zeros((), spec.data_type), spec.shape)  # N is an announcement so far
        return self._read(path, spec)

    def _read(self, path: str, spec: ArraySpec) -> np.ndarray:
        otherwise = f"index array {path} of {self._storage} is not the one that was sealed"
        _check_sealed(self._storage, self._record, otherwise, path, spec)
        (key,) = array_keys(path, spec)
        return unpack_array(self._storage.read(key, object_limit(spec)), spec.data_type, spec.shape, key)


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """The target's tables in the cache dtype: embedding and head (V, H), and the head's bias (V,) where it has one."""

    embed: torch.Tensor
    head: torch.Tensor
    bias: torch.Tensor | None

    def __repr__(self) -> str:
        (rows, width), bias = self.embed.shape, "no" if self.bias is None else "a"
        return f"TargetWeights(embed and head ({rows}, {width}) {self.embed.dtype}, {bias} bias)"


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
    dtype, spec = record.schema.dtype, record.schema.weights(record.weights[path])
    _check_sealed(storage, record, f"target weights {path} of {storage} are not the ones that were written", path, spec)
    keys, rows = array_keys(path, spec), spec.chunk[0]
    table = np.empty((len(keys) * rows, *spec.shape[1:]), dtype.stored)
    for index, key in enumerate(keys):
        stored = memoryview(storage.read(key, object_limit(spec)))
        crc = int.from_bytes(stored[-4:], "little")
        spec.chain.decode(stored, table[index * rows : (index + 1) * rows], crc=crc)
    return bits_tensor(table[: spec.shape[0]], dtype.torch_dtype)


def _check_sealed(storage: Storage, record: StoreRecord, otherwise: str, path: str, spec: ArraySpec) -> None:
    """Raise DamagedStoreError, saying what is wrong ``otherwise``, unless an array has the digest that is sealed."""
    if array_checksum(storage, path, spec) != record.checksums.get(path):
        raise DamagedStoreError(f"{otherwise}; {remedy(storage)}")
