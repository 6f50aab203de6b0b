"""Copying one shard of a store into another store: of its tokens, or of its states.

A shard of the copy is written by whichever worker takes it, here or on another machine, and may be written twice: its
bytes are the same each time, and only one ledger row is ever published.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from crc32c import crc32c

from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.dtypes import rounded_states, tensor_bits
from dspark_store.format.int8 import quantise
from dspark_store.format.ledger import state_ledger, token_ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.metadata import read_seal
from dspark_store.format.objects import Expected, StoredObject, open_object
from dspark_store.format.schema import IDS, LAST, LAYERS, MASK, NO_RECORD, TOKEN_OBJECTS, StateObject, StoreSchema
from dspark_store.format.shard import ObjectRecord
from dspark_store.format.storage import LocalStorage, Storage
from dspark_store.format.token_shards import TokenRows, shard_digest
from dspark_store.inspection.sizes import shared_slot
from dspark_store.readers.cache import Cache
from dspark_store.writers.lock import check_lock
from dspark_store.writers.pipeline import EncodePipeline
from dspark_store.writers.publish import STATUS_GOOD
from dspark_store.writers.states import FinishedObjects, StateShardWriter, publish_states
from dspark_store.writers.tokens import write_token_shard

_ROWS_A_READ = 64
_BUFFER_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class CopyTask:
    """What the copying of every shard has in common; it travels to other processes.

    ``seal`` is the source's, ``record`` the copy's, ``holder`` whoever holds the copy's lock; ``threads`` encode a
    shard of states.
    """

    source: LocalStorage
    seal: str
    destination: LocalStorage
    record: StoreRecord
    holder: str
    threads: int = 1

    def check(self) -> None:
        """Raise LostLockError unless the job still holds the copy."""
        check_lock(self.destination, self.holder)


@contextlib.contextmanager
def naming_source(storage: Storage) -> Iterator[None]:
    """Say of damage that the block meets that it is the source's."""
    try:
        yield
    except DamagedStoreError as error:
        raise DamagedStoreError(
            f"the source is damaged: {error} (all that is wrong with it: dspark-store verify {storage})"
        ) from error


@lru_cache(maxsize=4)
def open_source(storage: LocalStorage, seal: str) -> Cache:
    """Open the source, once a process; ValueError when it is another than when the copying began."""
    cache = Cache(storage, verify=True)
    if read_seal(storage) != seal:
        raise ValueError(f"{storage} was changed while it was being copied; copy it again, to another destination")
    return cache


def copy_tokens(task: CopyTask, shard: int) -> None:
    """Write, read back and commit the tokens of a shard of the copy, unless they are there.

    DamagedStoreError naming the object where the source is damaged, or the copy does not read back.
    """
    record = task.record
    if task.destination.exists(token_ledger(task.destination).key(shard)):
        return
    samples = record.schema.tokens.rows(shard)
    with naming_source(task.source):
        source = open_source(task.source, task.seal)
        rows = _read_tokens(source, samples)
        cursor = _cursor_after(source, samples.stop)
    task.check()
    with contextlib.suppress(FileExistsError):  # whoever was faster has written the same, as settling will check
        write_token_shard(task.destination, record, shard, rows, cursor, read_back=True)


def _read_tokens(source: Cache, samples: range) -> TokenRows:
    ids, masks = list[np.ndarray](), list[np.ndarray]()
    for first in range(samples.start, samples.stop, _ROWS_A_READ):
        part = range(first, min(first + _ROWS_A_READ, samples.stop))
        batch = source.read(part, columns=(IDS, MASK))
        for row, length in enumerate(source.lengths[part.start : part.stop].tolist()):
            ids.append(batch[IDS][row, :length].numpy().astype(np.int32))
            masks.append(batch[MASK][row, :length].numpy().astype(np.uint8))
    rows = TokenRows(ids, masks, source.source[samples.start : samples.stop].tolist())
    for sample, digest in zip(samples, rows.digests(), strict=True):
        if digest != source.index.digest[sample].tobytes():
            raise DamagedStoreError(f"index/digest of sample {sample} differs from its tokens")
    return rows


def _cursor_after(source: Cache, stop: int) -> int:
    """Return the position in the data after the samples before ``stop``: known where a shard of the source ends."""
    grid = source.schema.tokens
    if stop != grid.num_samples and stop % grid.shard_size:
        return NO_RECORD
    return source.index.object_record((stop - 1) // grid.shard_size, len(TOKEN_OBJECTS) - 1).nbytes


def copy_states(task: CopyTask, shard: int) -> int:
    """Write, read back and commit the states of a shard of the copy, unless they are there; return the bytes stored.

    Memory is a row and what waits for encoders and the disk, whatever the shard's size. DamagedStoreError naming the
    object where the source is damaged, or the copy does not read back; LostLockError when the copy is another job's.
    """
    record, destination = task.record, task.destination
    key = state_ledger(destination, record.schema).key(shard)
    if destination.exists(key):
        return 0
    samples, layer_ids = record.schema.tokens.rows(shard), record.schema.layer_ids
    with naming_source(task.source):
        source = open_source(task.source, task.seal)
        _check_labels(source, samples, layer_ids)
        shared = shared_slot(source, _source_shards(source, samples))
        kept = None if shared is None else source.schema.layer_ids[shared]
        shared = layer_ids.index(kept) if kept in layer_ids else None  # its slot in the copy
    tokens = _tokens_digest(source, samples)
    with EncodePipeline(task.threads, _BUFFER_BYTES) as pipeline:
        writer = StateShardWriter(
            destination, record, shard, rows=len(samples), tokens=tokens, pipeline=pipeline, shared_slot=shared
        )
        try:
            with naming_source(task.source):
                checksums = _fill(source, writer, samples, record.schema)
                writer.drain()
                _check_status(source, samples, writer.nonfinite_rows(), layer_ids)
            if destination.exists(key):
                writer.abort()
                return 0
            task.check()
            finished = writer.finish(task.check)
        except BaseException:
            writer.abort()
            raise
    _read_back(task, shard, tokens, finished, source.lengths[samples.start : samples.stop].tolist(), checksums)
    task.check()
    return _publish(task, shard, finished)


def _tokens_digest(source: Cache, samples: range) -> str:
    return shard_digest(source.index.digest[sample].tobytes() for sample in samples)


def _source_shards(source: Cache, samples: range) -> range:
    size = source.schema.shard_size
    return range(samples.start // size, (samples.stop - 1) // size + 1)


def _check_labels(source: Cache, samples: range, layer_ids: Sequence[int]) -> None:
    """Check that the objects which the samples are read from were computed from the tokens that the source holds."""
    for shard in _source_shards(source, samples):
        tokens = _tokens_digest(source, source.schema.tokens.rows(shard))
        for item in source.schema.state_objects:
            if item.column in source.foreign_columns or item.layer_id not in (None, *layer_ids):
                continue
            expected = Expected(source.record.store_id, item.place(shard), tokens=tokens)
            open_object(source.storage, item.key(shard), source.schema.states, expected).reader.close()


def _fill(source: Cache, writer: StateShardWriter, samples: range, schema: StoreSchema) -> np.ndarray:
    """Give every row to the writer, as the copy is to have it; return the checksums of that, (rows, K + 1) uint32."""
    checksums = np.zeros((len(samples), schema.num_layers + 1), np.uint32)
    coded = schema.int8 is not None and source.schema.int8 is None
    for row, sample in enumerate(samples):
        states = source_states(source, sample, schema.layer_ids)
        if source.schema.int8 is None:
            states = [rounded_states(layer, schema.mantissa_bits) for layer in states]
        for position, item in enumerate(schema.state_objects if coded else ()):
            states[position], widened = quantise(states[position], schema.scale(item.column, item.slot))
            writer.count_widened(item, widened, len(states[position]))
        checksums[row] = [_checksum(layer) for layer in states]
        writer.add(row, states[:-1], states[-1])
    return checksums


def source_states(source: Cache, sample: int, layer_ids: Sequence[int]) -> list[torch.Tensor]:
    """Read what is stored of a sample's valid positions, states or codes: of some layers, then the last ones."""
    batch = source.read(
        [sample],
        columns=(LAYERS, LAST),
        layers=layer_ids,
        positions=slice(0, int(source.lengths[sample])),
        layout="stacked",
        dequantise=False,
    )
    return [*batch[LAYERS][0], batch[LAST][0]]


def _checksum(states: torch.Tensor) -> int:
    return crc32c(tensor_bits(states).reshape(-1).view(np.uint8))


def _check_status(source: Cache, samples: range, found: set[int], layer_ids: Sequence[int]) -> None:
    """Check that the rows which are not finite are those that the source says.

    Without all of its layers a copy may have fewer.
    """
    known = {row for row, sample in enumerate(samples) if source.status[sample] != STATUS_GOOD}
    wrong = found - known if len(layer_ids) < source.schema.num_layers else found ^ known
    if wrong:
        raise DamagedStoreError(f"index/status of sample {samples[min(wrong)]} differs from its states")


def _read_back(
    task: CopyTask, shard: int, tokens: str, finished: FinishedObjects, lengths: Sequence[int], checksums: np.ndarray
) -> None:
    """Read a shard's durable objects, and compare every value with what was given to the writer."""
    schema, records = task.record.schema, finished.records
    last = schema.state_objects[-1]
    for position, item in enumerate(schema.state_objects):
        expected = Expected(task.record.store_id, item.place(shard), records[item], tokens)
        stored = open_object(task.destination, item.key(shard), schema.states, expected)
        try:
            found = checksums[:, -1]
            if item == last or records[item] != records[last]:  # what stands at two places is read at one of them
                found = _stored_checksums(task.record, stored, lengths)
        finally:
            stored.reader.close()
        if not np.array_equal(found, checksums[:, position]):
            row = int((found != checksums[:, position]).argmax())
            raise DamagedStoreError(
                f"object {item.key(shard)} of {task.destination} reads back other than it was written, in row {row}"
            )


def _stored_checksums(record: StoreRecord, stored: StoredObject, lengths: Sequence[int]) -> np.ndarray:
    """Return the checksum of every row of an object, from its decoded chunks, (rows,) uint32."""
    schema = record.schema.stored
    chain, step = schema.chain(LAST), schema.chunk_tokens
    chunk = np.empty((step, schema.hidden_size), schema.dtype.stored)
    checksums = np.zeros(len(lengths), np.uint32)
    for row, length in enumerate(lengths):
        checksum = 0
        for number in range(schema.states.chunks_of(length)):
            stored.decode(row * schema.states.chunks_per_row + number, chain, chunk)
            valid = chunk[: length - number * step]
            checksum = crc32c(valid.reshape(-1).view(np.uint8), checksum)
        checksums[row] = checksum
    return checksums


def _publish(task: CopyTask, shard: int, finished: FinishedObjects) -> int:
    schema = task.record.schema
    try:
        return publish_states(task.destination, schema, shard, [finished]).stored_bytes
    except FileExistsError:
        ledger = state_ledger(task.destination, schema)
        if np.array_equal(ledger.row(shard), _row(schema.state_objects, finished.records)):
            return 0
        ledger.retract(shard)  # which of the two wrote its objects last is not known
        raise ValueError(
            f"shard {shard} of {task.destination} was written twice, with other bytes each time: let all workers have "
            "the same version of numcodecs, and run the command again"
        ) from None


def _row(items: Sequence[StateObject], records: Mapping[StateObject, ObjectRecord]) -> np.ndarray:
    return np.array([(records[item].nbytes, records[item].digest) for item in items], np.uint64)
