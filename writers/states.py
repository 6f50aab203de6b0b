"""Capture shards: the states of R samples, one object a layer, streamed as the batches come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from dspark_store.format.codecs import CodecChain, EncodedChunk
from dspark_store.format.dtypes import all_finite, bits_tensor
from dspark_store.format.ledger import Ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import STATE_LEDGER, StateObject, StoreSchema
from dspark_store.format.shard import ObjectLabel, ObjectRecord, ShardWriter
from dspark_store.format.storage import Storage
from dspark_store.writers.buffers import BufferPool
from dspark_store.writers.pipeline import EncodePipeline


@dataclass(frozen=True, slots=True)
class ShardReport:
    """What a committed shard holds: stored bytes over all objects, and its rows with non-finite values."""

    stored_bytes: int
    nonfinite: tuple[int, ...]


class NonFiniteError(ValueError):
    """A sample's states are not finite in the cache dtype, and the caller asked to stop at that."""


def state_ledger(storage: Storage, schema: StoreSchema) -> Ledger:
    """Return the ledger of the states phase."""
    return Ledger(storage, STATE_LEDGER, len(schema.state_objects))


class StateShardWriter:
    """Writes the states of one shard and commits it.

    ``shared_slot`` names the layer slot whose states are the last hidden states themselves: that object is written
    once and linked into its second place. ``tokens`` is the digest of the shard's tokens, ``rows`` its samples.
    """

    def __init__(
        self,
        storage: Storage,
        record: StoreRecord,
        shard: int,
        *,
        rows: int,
        tokens: str,
        pipeline: EncodePipeline,
        shared_slot: int | None = None,
    ) -> None:
        self._storage = storage
        self._record = record
        self._schema = record.schema
        self._shard = shard
        self._rows = rows
        self._tokens = tokens
        self._pipeline = pipeline
        self._chain = self._schema.chain(self._schema.state_objects[-1].column)
        self._nonfinite: list[set[int]] = []
        self._written: list[StateObject] = []
        self._writers: list[ShardWriter] = []
        layers = self._schema.state_objects[:-1]
        self._shared = None if shared_slot is None else layers[shared_slot]
        try:
            for item in self._schema.state_objects:
                if item != self._shared:
                    self._open(item)
        except BaseException:
            self.abort()
            raise

    def _open(self, item: StateObject) -> None:
        self._writers.append(ShardWriter(self._storage.create(item.key(self._shard)), self._schema.states.slots))
        self._written.append(item)
        self._nonfinite.append(set())

    def add(self, row: int, layers: Sequence[torch.Tensor], last: torch.Tensor) -> None:
        """Queue one sample: K tensors (length, H) in slot order and the last hidden states (length, H), on the CPU.

        Rows may come in any order; each row once. The states are cast and copied before this returns.
        """
        for position, item in enumerate(self._written):
            states = last if item is self._written[-1] else layers[item.slot]
            self._add_object(position, row, states)

    def _add_object(self, position: int, row: int, states: torch.Tensor) -> None:
        schema, buffers = self._schema, self._pipeline.buffers
        step, first = schema.chunk_tokens, row * schema.states.chunks_per_row
        for index in range(schema.states.chunks_of(len(states))):
            piece = states[index * step : (index + 1) * step]
            bits, finite = self._fill(piece)
            if not finite:
                self._nonfinite[position].add(row)
            task = partial(_encode, bits.view(schema.dtype.stored), self._chain, buffers)
            sink = partial(_store, self._writers[position], first + index, bits, buffers)
            # counted twice: its buffer is kept for the next chunk while what it was encoded to waits to be written
            self._pipeline.submit(task, 2 * bits.nbytes, sink)

    def _fill(self, piece: torch.Tensor) -> tuple[np.ndarray, bool]:
        """Cast the positions of one chunk into a buffer of (T, H) bits, the rest of it the fill value.

        Returned with it is whether the positions are finite: they are checked while the processor's cache has them.
        """
        schema = self._schema
        buffer = self._pipeline.buffers.acquire(schema.chunk_tokens * schema.hidden_size * schema.dtype.itemsize)
        bits = buffer.view(schema.dtype.bits).reshape(schema.chunk_tokens, schema.hidden_size)
        bits_tensor(bits, schema.dtype.torch_dtype)[: len(piece)].copy_(piece)
        bits[len(piece) :] = schema.dtype.fill_bits
        return bits, all_finite(bits[: len(piece)], schema.dtype)

    def commit(self) -> ShardReport:
        """Wait for the encoders, finish every object, then publish the ledger row: the commit."""
        self._pipeline.flush()
        records: dict[StateObject, ObjectRecord] = {}
        for item, writer, nonfinite in zip(self._written, self._writers, self._nonfinite, strict=True):
            records[item] = writer.finish(self._label(item, nonfinite))
        if self._shared is not None:
            last = self._written[-1]
            self._storage.link(last.key(self._shard), self._shared.key(self._shard))
            records[self._shared] = records[last]
        ordered = [records[item] for item in self._schema.state_objects]
        state_ledger(self._storage, self._schema).publish(self._shard, ordered)
        stored = sum(record.nbytes for item, record in records.items() if item != self._shared)
        return ShardReport(stored, tuple(sorted(set().union(*self._nonfinite))))

    def nonfinite_rows(self) -> set[int]:
        """Return the rows found non-finite so far."""
        return set().union(*self._nonfinite)

    def abort(self) -> None:
        """Drop the shard; nothing of it was visible."""
        self._pipeline.reset()
        for writer in self._writers:
            writer.abort()

    def _label(self, item: StateObject, nonfinite: set[int]) -> ObjectLabel:
        places = [item.place(self._shard)]
        if self._shared is not None and item is self._written[-1]:
            places.append(self._shared.place(self._shard))
        store_id = self._record.store_id
        return ObjectLabel(store_id, tuple(places), self._rows, self._tokens, tuple(sorted(nonfinite)))


def _encode(chunk: np.ndarray, chain: CodecChain, buffers: BufferPool) -> EncodedChunk:
    """Encode one chunk. Runs in an encoder thread."""
    encoded = chain.encode(chunk)
    if isinstance(encoded.payload, bytes):
        buffers.release(chunk.reshape(-1).view(np.uint8))
    return encoded


def _store(writer: ShardWriter, slot: int, chunk: np.ndarray, buffers: BufferPool, encoded: EncodedChunk) -> None:
    """Append an encoded chunk to its object. Runs in the writing thread."""
    writer.append(slot, encoded)
    if not isinstance(encoded.payload, bytes):
        buffers.release(chunk.reshape(-1).view(np.uint8))  # the payload was a view of it
