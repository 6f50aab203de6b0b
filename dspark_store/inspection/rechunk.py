"""Copying a store under new settings, from start to finish: verified, resumable, parallel over the copy's shards."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.int8 import AIMS, calibrate, spread
from dspark_store.format.ledger import state_ledger, token_ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.metadata import has_store, read_seal, write_metadata
from dspark_store.format.storage import LocalStorage
from dspark_store.inspection.copy_plan import (
    CopySettings,
    CopySize,
    begun_copy,
    copy_record,
    refuse_small_disk,
)
from dspark_store.inspection.copy_shards import (
    CopyTask,
    copy_states,
    copy_tokens,
    naming_source,
    open_source,
    source_states,
)
from dspark_store.inspection.repair.state import in_phase_states
from dspark_store.inspection.shardwise import Workers
from dspark_store.inspection.sizes import shares_tables
from dspark_store.inspection.state_diff import difference
from dspark_store.precompute.undo import full_disk_told, new_folders_undone, new_store_undone, retract_broken
from dspark_store.progress import start_progress
from dspark_store.readers.cache import Cache
from dspark_store.readers.index import StoreIndex, TargetWeights, read_weights
from dspark_store.text import size_text
from dspark_store.writers.lock import LostLockError, StoreLock
from dspark_store.writers.publish import complete_store, settle_tokens
from dspark_store.writers.recovery import sweep_finished, sweep_uncommitted
from dspark_store.writers.weights import write_weights

_log = logging.getLogger(__name__)


def rechunk(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    settings: CopySettings,
    *,
    workers: Workers | None = None,
    take_over: bool = False,
) -> bool:
    """Copy a complete store under new settings; return False where the copy was complete before.

    Every shard of the copy is read back from the disk and compared before it is committed. A copy that was interrupted
    goes on where it was. ``take_over`` pushes another job on the same copy aside.

    Raises FileNotFoundError or ValueError for a source or destination that is none, DamagedStoreError naming the object
    where the source is damaged or the copy does not read back, and OSError; what is committed stays.
    """
    old, new = LocalStorage(Path(source).absolute()), LocalStorage(Path(destination).absolute())
    _refuse_overlap(old.root, new.root)
    with naming_source(old):
        cache = Cache(old, verify=True)
        seal = read_seal(old)
    wanted = copy_record(cache.record, seal, settings)
    begun = begun_copy(new, wanted)
    if begun is not None and begun.complete:
        sweep_finished(new, begun)
        return False
    with naming_source(old):
        coming = CopySize(cache, begun or wanted).coming(*_missing(new, begun or wanted))
    refuse_small_disk(new, coming)
    try:
        with (
            full_disk_told(new.root, "what is committed stays: free some, and run the same command again"),
            new_folders_undone(new.root),
            StoreLock(new, take_over=take_over) as lock,
            new_store_undone(new, lock.holder),
        ):
            return _fill(cache, CopyTask(old, seal, new, wanted, lock.holder), workers or Workers())
    except LostLockError as error:
        raise BlockingIOError(str(error)) from error
    finally:
        open_source.cache_clear()


def _refuse_overlap(source: Path, destination: Path) -> None:
    old, new = source.resolve(), destination.resolve()
    if old == new or old in new.parents or new in old.parents:
        raise ValueError(f"a copy must stand apart from its source: {destination} and {source} are not")


def _missing(destination: LocalStorage, record: StoreRecord) -> tuple[list[int], list[int]]:
    """Return the shards whose tokens, and those whose states, are not committed."""
    shards = range(record.schema.tokens.num_shards)
    tokens, states = token_ledger(destination), state_ledger(destination, record.schema)
    there = set(tokens.committed()), set(states.committed())
    return [shard for shard in shards if shard not in there[0]], [shard for shard in shards if shard not in there[1]]


def _fill(source: Cache, task: CopyTask, workers: Workers) -> bool:
    """Do what the copy lacks, under its lock; return False where that is nothing."""
    destination = task.destination
    if has_store(destination):  # read again: another job may have moved on
        record = begun_copy(destination, task.record) or task.record
        if record.complete:
            return False
        for broken in retract_broken(destination, record):
            _log.warning("a committed shard whose objects are not all there is copied again: %s", broken)
        sweep_uncommitted(destination, record)
    else:
        record = task.record
        write_metadata(destination, record)
    if record.phase == "tokens":
        record = _settle(source, replace(task, record=record), workers)
    _check_index(source, destination, record)
    if source.record.weights and not record.weights:
        record = _copy_weights(source, task, record)
    if not record.schema.calibrated:
        record = _calibrated(source, task, record)
    shards = _missing(destination, record)[1]
    _copy_states(source, replace(task, record=record, threads=workers.encoders(len(shards))), shards, workers)
    task.check()
    sweep_uncommitted(destination, record)  # what lost workers have left
    whole = complete_store(destination, record)
    try:
        _check_complete(source, destination, whole)
    except BaseException:
        write_metadata(destination, replace(in_phase_states(whole), declared_complete=False))
        raise
    return True


def _settle(source: Cache, task: CopyTask, workers: Workers) -> StoreRecord:
    """Copy the tokens that the copy lacks, and enter its states phase."""
    shards = _missing(task.destination, task.record)[0]
    rows = task.record.schema.tokens.rows
    done = source.schema.num_samples - sum(len(rows(shard)) for shard in shards)
    with start_progress("copy tokens", source.schema.num_samples, "samples", done) as progress:
        for shard, _ in workers.each(partial(copy_tokens, task), shards):
            progress.advance(len(rows(shard)))
    task.check()
    return settle_tokens(task.destination, task.record)


def _copy_states(source: Cache, task: CopyTask, shards: Sequence[int], workers: Workers) -> None:
    size = CopySize(source, task.record)
    todo = size.raw(shards)
    total = size.raw(range(task.record.schema.tokens.num_shards))
    copied = stored = 0
    with start_progress("copy states", total, "B", total - todo) as progress:
        for shard, written in workers.each(partial(copy_states, task), shards):
            raw = size.raw([shard])
            copied, stored = copied + raw, stored + written
            coming = stored * (todo - copied) / max(1, copied)
            progress.advance(raw, f"{size_text(stored)} written, about {size_text(coming)} to come")


def _calibrated(source: Cache, task: CopyTask, record: StoreRecord) -> StoreRecord:
    """Calibrate the copy's codes on rows of its first shard, and write that down."""
    schema = record.schema
    chosen = spread(source.lengths[: schema.shard_size].tolist())
    with naming_source(task.source):
        rows = [source_states(source, row, schema.layer_ids) for row in chosen]
    scales = {
        item.name: calibrate([row[place] for row in rows], schema.hidden_size, AIMS[str(schema.int8)])
        for place, item in enumerate(schema.state_objects)
    }
    record = replace(record, schema=schema.with_scales(scales))
    task.check()
    write_metadata(task.destination, record)
    return record


def _copy_weights(source: Cache, task: CopyTask, record: StoreRecord) -> StoreRecord:
    with naming_source(task.source):
        tables = source.weights()
    dtype = record.schema.dtype.torch_dtype
    bias = None if tables.bias is None else tables.bias.to(dtype)
    tables = TargetWeights(tables.embed.to(dtype), tables.head.to(dtype), bias)
    task.check()
    tied = shares_tables(source.record)
    record = replace(record, head=source.record.head)  # a repair has forgotten it together with the tables
    record = write_weights(task.destination, record, tables.embed, tables.head, tables.bias, tied=tied)
    if not _same_weights(tables, read_weights(task.destination, record)):
        raise DamagedStoreError(f"target weights of {task.destination} read back other than they were written")
    task.check()
    write_metadata(task.destination, record)
    return record


def _same_weights(one: TargetWeights, other: TargetWeights) -> bool:
    pairs = ((one.embed, other.embed), (one.head, other.head), (one.bias, other.bias))
    there = [(left, right) for left, right in pairs if left is not None and right is not None]
    same = all(left.dtype == right.dtype and difference(left, right) is None for left, right in there)
    return same and (one.bias is None) == (other.bias is None)


def _check_index(source: Cache, destination: LocalStorage, record: StoreRecord) -> None:
    """Check that the copy has the source's samples, in its order."""
    index = StoreIndex(destination, record)
    for name in ("length", "supervised", "digest", "source"):
        with naming_source(source.storage):
            old = getattr(source.index, name)
        if not np.array_equal(old, getattr(index, name)):
            raise DamagedStoreError(f"index/{name} of {destination} differs from that of {source.storage}")


def _check_complete(source: Cache, destination: LocalStorage, record: StoreRecord) -> None:
    """Check the sealed copy once more, as a reader opens it."""
    copy = Cache(destination)
    _check_index(source, destination, copy.record)
    whole = len(record.schema.layer_ids) == len(source.layer_ids)
    if whole and not np.array_equal(source.status, copy.status):
        raise DamagedStoreError(f"index/status of {destination} differs from that of {source.storage}")
