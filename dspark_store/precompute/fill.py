"""Filling a store: rank 0 makes its tokens, all ranks capture its states, rank 0 publishes it."""

from __future__ import annotations

import json
import logging
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import transformers

from dspark_store.format.damage import DamagedStoreError, remedy
from dspark_store.format.int8 import LayerScale
from dspark_store.format.jsonvalue import JsonFields, JsonValue
from dspark_store.format.ledger import state_ledger, token_ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.metadata import read_record, write_metadata
from dspark_store.format.schema import StoreSchema
from dspark_store.format.sizes import Volume, weight_bytes
from dspark_store.format.storage import LocalStorage
from dspark_store.precompute.capture import (
    CaptureContext,
    CaptureEvents,
    CaptureSettings,
    capture_shards,
    check_equality_class,
    costly_first,
    missing_shards,
    with_producer,
)
from dspark_store.precompute.copies import HostCopies
from dspark_store.precompute.crew import Crew, own_objects
from dspark_store.precompute.estimate import refuse_full_disk
from dspark_store.precompute.job import Job, open_or_create
from dspark_store.precompute.job_target import JobTarget, equality_class
from dspark_store.precompute.ranks import World
from dspark_store.precompute.report import CaptureCounts, CaptureReport, Profile
from dspark_store.precompute.settings import PrecomputeConfig
from dspark_store.precompute.tokenise import SampleCounts, print_counts, rows_read, tell_refusals, tokenise
from dspark_store.precompute.undo import clean, full_disk_told, new_store_undone
from dspark_store.precompute.watch import FAILED, StoppedError
from dspark_store.readers.index import StoreIndex
from dspark_store.target.batches import BatchLimit, forward_cost
from dspark_store.target.parallel import ParallelPlan
from dspark_store.text import say
from dspark_store.writers.lock import LostLockError, StoreLock, check_lock
from dspark_store.writers.pipeline import EncodePipeline
from dspark_store.writers.publish import complete_store
from dspark_store.writers.weights import write_weights

_log = logging.getLogger(__name__)
_SHARDS_PER_WORKER = 4


@dataclass(frozen=True, slots=True)
class _Begun:
    """What rank 0 tells the others when the states can be captured."""

    lock: str
    shards: list[int]
    needs_weights: bool


def fill_store(
    world: World, job: Job | None, storage: LocalStorage, target: JobTarget, *, smoke: bool = False
) -> CaptureReport | None:
    """Do what a store lacks; every rank calls it, rank 0 with the job. Returns rank 0's report.

    The store of a ``smoke`` test is small on purpose, and is not profiled.

    Raises OSError, ValueError and what else a user can mend, and StoppedError when the job ends for a reason outside of
    this rank's work, as when another job has taken the store over; what is committed stays.
    """
    try:
        with full_disk_told(storage.root, "what is committed stays: free some, go on with --resume"):
            if job is not None:
                return _fill_as_leader(world, job, storage, target, smoke=smoke)
            _fill_as_follower(world, storage, target, smoke=smoke)
            return None
    except LostLockError as error:
        raise StoppedError(str(error), FAILED) from error
    except DamagedStoreError as error:
        if smoke:
            raise
        advice = remedy(storage)
        told = str(error) if advice in str(error) else f"{error}; {advice}"
        raise DamagedStoreError(f"{told}, then go on with --resume") from error


def _fill_as_leader(world: World, job: Job, storage: LocalStorage, target: JobTarget, *, smoke: bool) -> CaptureReport:
    watch = world.watch
    lock = StoreLock(storage, take_over=job.config.take_over, on_lost=watch.stop, pause=watch.pause)
    watch.before_leaving(lock.release)  # before it is taken: to take it over may last
    # the lock is given back when the others have heard of a failure: they would take its absence for the cause
    with lock, world.failing_together(), new_store_undone(storage, lock.holder):
        check = partial(_check_may_write, world, storage, lock.holder)
        record = open_or_create(storage, job.new_record, job.config)
        check_equality_class(
            storage, record, equality_class(target.plan, target.device), allow=job.config.mix_equality_classes
        )
        clean(storage, record)
        before = token_ledger(storage).committed()
        if record.phase == "tokens":
            with watch.working(lambda: rows_read(job.source)):
                record = tokenise(storage, record, job.source, check, watch.progress)
            tell_refusals(job.source)
        index = StoreIndex(storage, record)
        if not smoke:  # whose few samples say nothing about all of them
            _tell_samples(storage, record, job, index, before)
        lengths = [int(length) for length in index.length]
        _refuse_full_disk(storage, record, lengths)
        if not smoke:
            _warn_of_few_shards(record.schema, job.config, target.plan.crews)
        shards = _shards_to_do(storage, record.schema, job.config.batch_limit, lengths, target.plan.crews)
        begun = _Begun(lock.holder, shards, not record.weights)
        world.share("begun", lambda: asdict(begun))
        if begun.needs_weights:
            record = _write_weights(storage, record, target, check)
        if not state_ledger(storage, record.schema).committed():  # whoever was here before has left nothing
            record = replace(record, producers=())
        record = _with_producer(record, target) if shards else record  # else there is no target to load
        check()
        write_metadata(storage, record)
        record, report = _capture(world, storage, record, target, begun, lengths, smoke=smoke)
        check()
        complete_store(storage, _with_rate(record, report) if shards else record)
        world.share("published", lambda: True)
        return report


def _fill_as_follower(world: World, storage: LocalStorage, target: JobTarget, *, smoke: bool) -> None:
    begun = _Begun(**cast("dict[str, Any]", world.receive("begun")))
    record = read_record(storage)
    if begun.needs_weights:
        target.loaded.weights()
    _capture(world, storage, record, target, begun, [], smoke=smoke)
    world.receive("published")


def _check_may_write(world: World, storage: LocalStorage, holder: str) -> None:
    """Count a step of the work; StoppedError when the job is to end, LostLockError when the store is another's."""
    world.watch.progress()
    check_lock(storage, holder)


def _tell_samples(storage: LocalStorage, record: StoreRecord, job: Job, index: StoreIndex, before: list[int]) -> None:
    """Print how many samples are cut and not supervised; shards ``before`` were tokenised by an earlier run.

    UnsupervisedError when none is supervised, unless states were captured all the same.
    """
    schema = record.schema
    read_before = np.isin(np.arange(schema.num_samples) // schema.shard_size, before)
    counts = SampleCounts.of(job.source, schema.seq_length, index.length, index.supervised, read_before)
    print_counts(counts)
    if not state_ledger(storage, schema).committed():
        counts.check()


def _refuse_full_disk(storage: LocalStorage, record: StoreRecord, lengths: list[int]) -> None:
    rows = record.schema.tokens.rows
    missing = [lengths[row] for shard in missing_shards(storage, record.schema) for row in rows(shard)]
    volume = Volume.of(record.schema, missing, missing)
    tables = 0 if record.weights else weight_bytes(record)
    refuse_full_disk(record.schema, record.last_layer, volume, storage.free_bytes(), tables)


def _shards_to_do(
    storage: LocalStorage, schema: StoreSchema, limit: BatchLimit, lengths: Sequence[int], workers: int
) -> list[int]:
    """Return the shards without a ledger row; the costly ones first where several workers take from them."""
    missing = missing_shards(storage, schema)
    if workers == 1:
        return missing
    costs = {shard: forward_cost([lengths[row] for row in schema.tokens.rows(shard)], limit) for shard in missing}
    return costly_first(costs)


def _warn_of_few_shards(schema: StoreSchema, config: PrecomputeConfig, workers: int) -> None:
    wanted, shards = _SHARDS_PER_WORKER * workers, schema.tokens.num_shards
    step = config.batch_size if config.batch_tokens is None else 1
    better = max(1, schema.num_samples // wanted // step) * step
    if workers > 1 and shards < wanted and better < schema.shard_size:
        _log.warning(
            "%d shards are few for %d workers, and some will idle: a new store with --shard-size %d would have %d",
            *(shards, workers, better, -(-schema.num_samples // better)),
        )


def _write_weights(
    storage: LocalStorage, record: StoreRecord, target: JobTarget, check: Callable[[], None]
) -> StoreRecord:
    tables = target.loaded.weights()
    check()  # to load the target may have taken long
    if tables is None:
        raise RuntimeError("rank 0 was given no vocabulary tables")
    record = replace(record, head=tables.facts)
    tied = bool(tables.facts["tied"])
    return write_weights(storage, record, tables.embedding, tables.head, tables.head_bias, tied=tied)


def _with_producer(record: StoreRecord, target: JobTarget) -> StoreRecord:
    device, plan = target.device, target.plan
    facts: dict[str, JsonValue] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "attn_implementation": getattr(target.loaded.model.config, "_attn_implementation", None),
        "world_size": plan.world_size,
        "parallel": plan.kind,
        "degrees": {"fsdp": plan.fsdp, "tp": plan.tp, "ep": plan.ep, "pp": plan.pp},
        "reduce_dtype": plan.reduce_dtype,
        "equality_class": equality_class(plan, device),
    }
    return with_producer(record, facts, transformers=transformers.__version__)


def _with_rate(record: StoreRecord, report: CaptureReport) -> StoreRecord:
    producer = {
        **record.producers[-1],
        "tokens": report.tokens,
        "tokens_per_second": round(report.tokens_per_second, 3),
    }
    return replace(record, producers=(*record.producers[:-1], producer))


def _capture(
    world: World,
    storage: LocalStorage,
    record: StoreRecord,
    target: JobTarget,
    begun: _Begun,
    lengths: Sequence[int],
    *,
    smoke: bool,
) -> tuple[StoreRecord, CaptureReport]:
    """Capture the shards that are missing; return the record, calibrated, and what was captured."""
    if not begun.shards:
        return record, CaptureReport(0, 0, 0, 0.0)
    config, schema, plan = target.config, record.schema, target.plan
    capture = target.loaded.capture(schema.layer_ids)
    settings = CaptureSettings(
        device=target.input_device,
        batch_limit=config.batch_limit,
        pad_token_id=cast(int, record.manifest["pad_token_id"]),
        last_layer=record.last_layer,
        stop_on_nonfinite=config.on_nonfinite == "error",
    )
    objects = own_objects(schema, plan, world.rank, record.last_layer + 1)
    crew = Crew(world, plan, target.control, schema, begun.shards)
    profile = Profile()
    started = time.monotonic()
    with (
        CaptureCounts(world, record, begun.shards, lengths) as counts,
        EncodePipeline(config.resolved_encode_threads, config.write_buffer_bytes) as pipeline,
    ):
        copies = HostCopies(target.input_device, schema.dtype.torch_dtype)
        context = CaptureContext(storage, record, capture, settings, objects, pipeline, copies, profile)
        check = partial(_check_may_write, world, storage, begun.lock)
        if not schema.calibrated:
            record = _calibrated(world, context, plan, check)
            context = replace(context, record=record)
        events = CaptureEvents(
            batch=counts.batch,
            committed=counts.committed,
            before_commit=check,
            progress=world.watch.progress,
        )
        with world.watch.working(lambda: (pipeline.encode_seconds, pipeline.write_seconds)):
            capture_shards(context, crew, events)
        if world.leads:
            with profile.timed("wait"):
                counts.wait_for_all(len(begun.shards))
    seconds = time.monotonic() - started
    if config.profile and not smoke:
        for line in profile.lines(seconds, pipeline.encode_seconds, pipeline.write_seconds):
            say(line if world.size == 1 else f"rank {world.rank} {line}")
    return record, counts.report(seconds)


def _calibrated(world: World, context: CaptureContext, plan: ParallelPlan, check: Callable[[], None]) -> StoreRecord:
    """Calibrate a store of codes once: every rank runs the same batches, and what the first crew finds is written down.

    It stands in the root before any rank makes a code, so that a resumed job finds it.
    """
    record = context.record
    finders = [rank for rank in plan.crew(0) if plan.writes(rank)]
    found = {name: scale.to_json() for name, scale in context.calibrate().items()}
    if world.rank in finders:
        world.keys.set(f"calibration/{world.rank}", json.dumps(found))
    if not world.leads:
        found = cast("dict[str, dict[str, JsonValue]]", world.receive("calibration"))
        return _with_scales(record, found)
    for rank in finders:
        found |= json.loads(world.wait_for(partial(world.keys.get, f"calibration/{rank}")))
    record = _with_scales(record, found)
    check()
    write_metadata(context.storage, record)
    world.share("calibration", lambda: found)  # now that it is in the root
    return record


def _with_scales(record: StoreRecord, found: Mapping[str, Mapping[str, JsonValue]]) -> StoreRecord:
    schema = record.schema
    fields = {name: JsonFields(scale, "calibration") for name, scale in found.items()}
    scales = {name: LayerScale.from_json(scale, schema.hidden_size) for name, scale in fields.items()}
    return replace(record, schema=schema.with_scales(scales))
