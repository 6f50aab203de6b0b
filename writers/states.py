"""Capture shards: the states of R samples, one object a layer, streamed as the batches come."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from dspark_store.format.codecs import EncodedChunk, Plain
from dspark_store.format.dtypes import all_finite, bits_tensor, round_mantissa, tensor_bits
from dspark_store.format.int8 import quantise
from dspark_store.format.ledger import state_ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import StateObject, StoreSchema
from dspark_store.format.shard import ObjectLabel, ObjectRecord, ShardWriter
from dspark_store.format.storage import Storage
from dspark_store.writers.pipeline import EncodePipeline

_log = logging.getLogger(__name__)
_WARNED: set[tuple[str, StateObject]] = set()
_MORE_WIDENED = 0.02
"""A share of tokens beyond twice that of the sample, from which on a shard is unlike it."""
_TASK_BYTES = 2 * 1024 * 1024  # smaller chunks are encoded several at a time: a task has a cost of its own


@dataclass(frozen=True, slots=True)
class ShardReport:
    """What a committed shard holds: stored bytes over all objects, and its rows with non-finite values."""

    stored_bytes: int
    nonfinite: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FinishedObjects:
    """Objects of a shard that are on disk and wait for their ledger row.

    ``stored_bytes`` counts a shared object once; ``nonfinite`` are the rows with values that are not finite.
    """

    records: Mapping[StateObject, ObjectRecord]
    stored_bytes: int
    nonfinite: tuple[int, ...]

    def to_json(self) -> str:
        """Return this as JSON, for another process."""
        records = {item.name: [record.nbytes, record.digest] for item, record in self.records.items()}
        return json.dumps([records, self.stored_bytes, self.nonfinite])

    @classmethod
    def from_json(cls, text: str, schema: StoreSchema) -> FinishedObjects:
        """Read back what `to_json` returned."""
        records, stored, nonfinite = json.loads(text)
        items = {item: ObjectRecord(*records[item.name]) for item in schema.state_objects if item.name in records}
        return cls(items, stored, tuple(nonfinite))


class _Piece(NamedTuple):
    """Some chunks of a row, states (positions, H), whose first one has this slot in the object."""

    row: int
    slot: int
    chunks: int
    states: torch.Tensor


class NonFiniteError(ValueError):
    """A sample's states are not finite in the cache dtype, and the caller asked to stop at that."""


def publish_states(storage: Storage, schema: StoreSchema, shard: int, parts: Sequence[FinishedObjects]) -> ShardReport:
    """Publish a shard's ledger row, which is its commit; ``parts`` together hold all of its objects.

    FileExistsError when the shard is committed already.
    """
    records = {item: record for part in parts for item, record in part.records.items()}
    state_ledger(storage, schema).publish(shard, [records[item] for item in schema.state_objects])
    rows = {row for part in parts for row in part.nonfinite}
    return ShardReport(sum(part.stored_bytes for part in parts), tuple(sorted(rows)))


class StateShardWriter:
    """Writes the states of one shard and commits it.

    ``shared_slot`` names the layer slot whose states are the last hidden states themselves: that object is written
    once and linked into its second place. ``tokens`` is the digest of the shard's tokens, ``rows`` its samples.
    ``objects`` are those that this writer writes: all of them, or the ones that a pipeline stage holds.
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
        objects: Iterable[StateObject] | None = None,
    ) -> None:
        self._storage = storage
        self._record = record
        self._schema = record.schema
        self._stored = record.schema.stored
        self._shard = shard
        self._rows = rows
        self._tokens = tokens
        self._pipeline = pipeline
        self._chain = self._schema.chain(self._schema.state_objects[-1].column)
        self._compressed = not isinstance(self._chain.compressor, Plain)
        self._chunk_bytes = self._schema.chunk_tokens * self._schema.hidden_size * self._schema.dtype.itemsize
        self._last = self._schema.state_objects[-1]
        self._shared = None if shared_slot is None else self._schema.state_objects[shared_slot]
        own = self._schema.state_objects if objects is None else objects
        self._written = [item for item in own if item != self._shared]
        self._nonfinite: list[list[int]] = [[] for _ in self._written]
        self._widened: list[list[tuple[int, int]]] = [[] for _ in self._written]
        self._waiting: list[list[_Piece]] = [[] for _ in self._written]  # of each object, for a task to be full
        self._writers: dict[StateObject, ShardWriter] = {}
        self._drained = False

    def add(
        self, row: int, layers: Sequence[torch.Tensor | None], last: torch.Tensor | None, *, more: bool = False
    ) -> None:
        """Queue one sample: K tensors (length, H) in slot order and the last hidden states (length, H), on the CPU.

        Of a store of codes they may be codes already, (length, W) int8. What another writer writes may be None. Rows
        may come in any order; each row once. With ``more``, another row follows at once, and what is small may wait for
        it. The encoder threads cast and copy the states, so nobody may change them before the shard is finished.
        """
        self._drained = False
        for position, item in enumerate(self._written):
            states = last if item == self._last else layers[item.slot]
            if states is None:
                raise ValueError(f"the states of {item} are missing")
            self._add_object(position, row, states, more=more)

    def _add_object(self, position: int, row: int, states: torch.Tensor, *, more: bool) -> None:
        schema, waiting = self._schema, self._waiting[position]
        step, first = schema.chunk_tokens, row * schema.states.chunks_per_row
        run = max(1, _TASK_BYTES // self._chunk_bytes)
        chunks = schema.states.chunks_of(len(states))
        for begin in range(0, chunks, run):
            part = states if chunks <= run else states[begin * step : (begin + run) * step]
            piece = _Piece(row, first + begin, min(run, chunks - begin), part)
            if sum(other.chunks for other in waiting) + piece.chunks > run:
                self._submit(position)
            waiting.append(piece)
        if not more:
            self._submit(position)

    def _submit(self, position: int) -> None:
        """Queue a task of the pieces of an object that wait for one."""
        pieces = tuple(self._waiting[position])
        self._waiting[position].clear()
        if pieces:
            task = partial(self._encode, pieces, position)
            sink = partial(self._store, self._written[position])
            # counted twice: as states that wait for an encoder, and as what waits for the disk
            self._pipeline.submit(task, 2 * sum(piece.chunks for piece in pieces) * self._chunk_bytes, sink)

    def _encode(self, pieces: Sequence[_Piece], position: int) -> list[tuple[int, list[EncodedChunk]]]:
        """Encode some pieces of rows in an encoder thread; return the first slot of each with its chunks."""
        step = self._schema.chunk_tokens
        encoded: list[tuple[int, list[EncodedChunk]]] = []
        for piece in pieces:
            made = [self._encode_chunk(states) for states in torch.split(self._codes(position, piece.states), step)]
            encoded.append((piece.slot, [chunk for chunk, _ in made]))
            if not all(finite for _, finite in made):
                self._nonfinite[position].append(piece.row)
        return encoded

    def _codes(self, position: int, states: torch.Tensor) -> torch.Tensor:
        """Return the codes of states of the object at a position; states as they are where there are no codes."""
        if self._schema.int8 is None or states.dtype == torch.int8:
            return states
        item = self._written[position]
        codes, widened = quantise(states, self._schema.scale(item.column, item.slot))
        self._widened[position].append((widened, len(states)))
        return codes

    def _encode_chunk(self, piece: torch.Tensor) -> tuple[EncodedChunk, bool]:
        """Check and encode the positions of one chunk, all while the processor's cache holds it.

        A whole chunk in the cache dtype is encoded where it lies. Any other is cast into a buffer (T, H), and rounded
        if the store is, the rest of it the fill value. Whether the states are finite is returned with it.
        """
        schema, buffers = self._stored, self._pipeline.buffers
        whole = len(piece) == schema.chunk_tokens and piece.dtype == schema.dtype.torch_dtype and piece.is_contiguous()
        if whole and self._compressed and schema.mantissa_bits is None:
            bits = tensor_bits(piece)
            return self._chain.encode(bits.view(schema.dtype.stored)), all_finite(bits, schema.dtype)
        buffer = buffers.acquire(schema.chunk_tokens * schema.hidden_size * schema.dtype.itemsize)
        bits = buffer.view(schema.dtype.bits).reshape(schema.chunk_tokens, schema.hidden_size)
        bits_tensor(bits, schema.dtype.torch_dtype)[: len(piece)].copy_(piece)
        if schema.mantissa_bits is not None:
            round_mantissa(bits[: len(piece)], schema.mantissa_bits)
        bits[len(piece) :] = schema.dtype.fill_bits
        finite = all_finite(bits[: len(piece)], schema.dtype)
        encoded = self._chain.encode(bits.view(schema.dtype.stored))
        if self._compressed:
            buffers.release(buffer)
        return encoded, finite

    def _writer(self, item: StateObject) -> ShardWriter:
        """Open an object when it is first written, which is in the writing thread: nobody else waits for that."""
        if item not in self._writers:
            self._writers[item] = ShardWriter(self._storage.create(item.key(self._shard)), self._schema.states.slots)
        return self._writers[item]

    def _store(self, item: StateObject, encoded: Sequence[tuple[int, Sequence[EncodedChunk]]]) -> None:
        """Append encoded chunks to their object, in the writing thread."""
        for slot, chunks in encoded:
            self._writer(item).append(slot, *chunks)
            for chunk in chunks if not self._compressed else ():
                payload = memoryview(chunk.payload).obj  # uncompressed, it was a view of the buffer
                if isinstance(payload, np.ndarray):
                    self._pipeline.buffers.release(payload)

    def drain(self) -> None:
        """Wait until all that was added is in its objects, once: the next shard's states may be queued behind it."""
        if not self._drained:
            self._pipeline.flush()
            self._drained = True

    def finish(self, on_object: Callable[[], None] = lambda: None) -> FinishedObjects:
        """Wait for what was added, then make all objects durable, and visible once they are; not yet committed.

        Syncs run side by side, of objects and of their folders. ``on_object`` is called when each object is durable,
        since a slow disk may take long for one, and right before each becomes visible.
        """
        self.drain()
        labels = [self._label(item, nonfinite) for item, nonfinite in zip(self._written, self._nonfinite, strict=True)]
        writers = [self._writer(item) for item in self._written]
        records: dict[StateObject, ObjectRecord] = {}
        with ThreadPoolExecutor(max(1, len(labels)), "sync") as pool:
            for item, record in zip(self._written, pool.map(ShardWriter.sync, writers, labels), strict=True):
                records[item] = record
                on_object()
            published = list[Future[None]]()
            for writer in writers:
                on_object()
                published.append(pool.submit(writer.publish))
            for done in published:
                done.result()
        stored = sum(record.nbytes for record in records.values())
        if self._shared is not None and self._last in records:
            self._storage.link(self._last.key(self._shard), self._shared.key(self._shard))
            records[self._shared] = records[self._last]
        return FinishedObjects(records, stored, tuple(sorted(self.nonfinite_rows())))

    def commit(self, before: Callable[[], None] = lambda: None) -> ShardReport:
        """Finish every object, then publish the ledger row: the commit. ``before`` is asked as `finish` asks."""
        finished = self.finish(before)
        before()  # the objects may have taken long, and another job may have swept them by now
        return publish_states(self._storage, self._schema, self._shard, [finished])

    def nonfinite_rows(self) -> set[int]:
        """Return the rows found non-finite so far."""
        return {row for rows in self._nonfinite for row in rows}

    def abort(self) -> None:
        """Drop the shard; nothing of it was visible."""
        self._pipeline.reset()
        for writer in self._writers.values():
            writer.abort()

    def count_widened(self, item: StateObject, widened: int, tokens: int) -> None:
        """Count the widened ones of tokens whose codes were made elsewhere."""
        if item in self._written:
            self._widened[self._written.index(item)].append((widened, tokens))

    def _label(self, item: StateObject, nonfinite: Sequence[int]) -> ObjectLabel:
        places = [item.place(self._shard)]
        if self._shared is not None and item == self._last:
            places.append(self._shared.place(self._shard))
        rows, store_id = tuple(sorted(set(nonfinite))), self._record.store_id
        return ObjectLabel(store_id, tuple(places), self._rows, self._tokens, rows, self._widened_tokens(item))

    def _widened_tokens(self, item: StateObject) -> int | None:
        """Return how many tokens of an object had their step widened, None without codes; warn where they are many."""
        counted = self._widened[self._written.index(item)]
        if not counted:
            return None
        widened, tokens = (sum(count[place] for count in counted) for place in (0, 1))
        calibrated = self._schema.scale(item.column, item.slot).widened
        if widened > tokens * (2 * calibrated + _MORE_WIDENED):
            self._warn_of_widened(item, widened / tokens, calibrated)
        return widened

    def _warn_of_widened(self, item: StateObject, share: float, calibrated: float) -> None:
        """Warn once per object of a store."""
        if (self._record.store_id, item) not in _WARNED:
            _WARNED.add((self._record.store_id, item))
            _log.warning(
                "%s: %.1f%% of the tokens of shard %d hold a value that is too large for their step and got a coarser "
                "one; in the sample that the store was calibrated on, %.1f%% did. If later rows are unlike the first, "
                "shuffle them, or keep --dtype bf16",
                item.name if item.layer_id is None else f"layer {item.layer_id}",
                *(100 * share, self._shard, 100 * calibrated),
            )
