"""The job from start to finish: plan, tokens, states, publishing, report."""

from __future__ import annotations

import errno
import logging
import platform
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import transformers
import zarr
from transformers import PreTrainedModel

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.metadata import has_store, read_record, write_metadata
from dspark_store.format.storage import LocalStorage
from dspark_store.precompute.capture import CaptureReport, CaptureSettings, capture_states, missing_shards
from dspark_store.precompute.config import PrecomputeConfig
from dspark_store.precompute.estimate import Volume, estimate_lines, refuse_full_disk, weight_bytes
from dspark_store.precompute.job import Job, check_identity, existing_record, plan_job
from dspark_store.precompute.progress import Progress
from dspark_store.precompute.report import print_report
from dspark_store.precompute.tokenise import tokenise
from dspark_store.precompute.undo import TargetError, new_folders_undone, new_store_undone
from dspark_store.readers.cache import open_cache
from dspark_store.readers.index import StoreIndex
from dspark_store.readers.verify import verify_store
from dspark_store.target import TargetCapture, head_facts, load_target, target_weights
from dspark_store.writers import (
    EncodePipeline,
    StoreLock,
    complete_store,
    sweep_finished,
    sweep_uncommitted,
    write_weights,
)

_log = logging.getLogger(__name__)
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


@dataclass(slots=True)
class _Target:
    """The target of a job, loaded when it is first needed and then kept."""

    job: Job
    _model: PreTrainedModel | None = None

    @property
    def model(self) -> PreTrainedModel:
        if self._model is None:
            config = self.job.config
            _log.info("loading the target %s", config.target_model)
            try:
                self._model = load_target(
                    self.job.target,
                    dtype=self.job.compute_dtype,
                    device=config.resolved_device,
                    attn_implementation=config.target_attn_implementation,
                )
            except ValueError as error:
                raise TargetError(str(error)) from error
        return self._model


def run(config: PrecomputeConfig) -> int:
    """Do the job; return the exit code 0.

    Raises built-in exceptions for whatever a user can get wrong (ValueError, OSError, ImportError), before anything
    of an existing store is touched.
    """
    config.check()
    storage = LocalStorage(config.output_dir)
    recorded = existing_record(storage, resume=config.resume or config.estimate)
    job = plan_job(config)
    if config.estimate:
        _print_estimate(job, storage, recorded)
        return 0
    if recorded is not None:
        check_identity(recorded, job)
        if recorded.complete:
            sweep_finished(storage, recorded)
            print(f"{config.output_dir} is complete; nothing to do")
            return 0
    target = _Target(job)
    with new_folders_undone(storage.root):
        if config.smoke:
            _smoke(job, target)
        report = _write_store(job, storage, target)
    print_report(open_cache(storage.root), report)
    return 0


def _write_store(job: Job, storage: LocalStorage, target: _Target) -> CaptureReport:
    try:
        with StoreLock(storage), new_store_undone(storage):
            return _fill_store(job, storage, target)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise OSError(
            error.errno,
            f"no space is left for {job.config.output_dir}; what is committed stays: free some, go on with --resume",
        ) from error


def _fill_store(job: Job, storage: LocalStorage, target: _Target) -> CaptureReport:
    record = _open_or_create(job, storage)
    swept = sweep_uncommitted(storage, record)
    if swept:
        _log.info("removed %d leftovers of an interrupted run", swept)
    if record.phase == "tokens":
        record = tokenise(storage, record, job.source)
    lengths = [int(length) for length in StoreIndex(storage, record).length]
    _refuse_full_disk(storage, record, lengths)
    record = _ensure_weights(storage, record, target)
    record = _with_producer(record, job, target)
    write_metadata(storage, record)
    report = _capture(job, storage, record, target, lengths)
    complete_store(storage, _with_rate(record, report))
    return report


def _open_or_create(job: Job, storage: LocalStorage) -> StoreRecord:
    """Return the record to go on with. It is read again under the lock: another job may have moved on."""
    if has_store(storage):
        record = read_record(storage)
        check_identity(record, job)
        return record
    write_metadata(storage, job.new_record)
    return job.new_record


def _refuse_full_disk(storage: LocalStorage, record: StoreRecord, lengths: list[int]) -> None:
    rows = record.schema.tokens.rows
    missing = [lengths[row] for shard in missing_shards(storage, record.schema) for row in rows(shard)]
    volume = Volume.of(record.schema, missing, missing)
    tables = 0 if record.weights else weight_bytes(record)
    refuse_full_disk(record.schema, record.last_layer, volume, storage.free_bytes() - tables)


def _ensure_weights(storage: LocalStorage, record: StoreRecord, target: _Target) -> StoreRecord:
    """Write the target's embedding and head, unless an earlier job has."""
    if record.weights:
        return record
    facts = head_facts(target.model)
    embed, head, bias = target_weights(target.model)
    tied = embed.data_ptr() == head.data_ptr() and embed.shape == head.shape
    record = replace(record, head=facts)
    return write_weights(storage, record, embed, head, bias, tied=tied)


def _with_producer(record: StoreRecord, job: Job, target: _Target) -> StoreRecord:
    device = job.config.resolved_device
    producer: dict[str, JsonValue] = {
        "host": platform.node(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "attn_implementation": getattr(target.model.config, "_attn_implementation", None),
        "world_size": 1,
        "parallel": "single",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "zarr": zarr.__version__,
    }
    return replace(record, producers=(*record.producers, producer))


def _with_rate(record: StoreRecord, report: CaptureReport) -> StoreRecord:
    producer = {
        **record.producers[-1],
        "tokens": report.tokens,
        "tokens_per_second": round(report.tokens_per_second, 3),
    }
    return replace(record, producers=(*record.producers[:-1], producer))


def _capture(
    job: Job, storage: LocalStorage, record: StoreRecord, target: _Target, lengths: list[int]
) -> CaptureReport:
    config = job.config
    settings = CaptureSettings(
        device=config.resolved_device,
        batch_size=config.batch_size,
        pad_token_id=job.pad_token_id,
        last_layer=record.last_layer,
        stop_on_nonfinite=config.on_nonfinite == "error",
    )
    capture = TargetCapture(target.model, record.schema.layer_ids)
    with EncodePipeline(config.resolved_encode_threads, config.write_buffer_bytes) as pipeline:
        return capture_states(storage, record, capture, settings, pipeline, lengths)


def _smoke(job: Job, target: _Target) -> None:
    """Write the first samples end to end into a temporary store beside the real one, and check it."""
    config = replace(job.config, max_samples=min(job.config.smoke, job.config.max_samples or job.config.smoke), smoke=0)
    parent = Path(config.output_dir).absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=".smoke-", dir=parent))
    try:
        small = plan_job(replace(config, output_dir=str(place), resume=False))
        target.job = small
        _write_store(small, LocalStorage(place), target)
        cache = open_cache(place)
        problems = verify_store(cache)
        if problems:
            raise ValueError(f"the smoke test failed: {problems[0].message} ({len(problems)} problems)")
        bad = int((cache.status != 0).sum())
        if bad == len(cache):
            raise ValueError(f"the smoke test failed: no sample is finite in {config.dtype}; take another --dtype")
        note = f"; {bad} are not finite in {config.dtype}" if bad else ""
        print(f"smoke test passed: {len(cache)} samples were written, read back and checked{note}")
    finally:
        target.job = job
        shutil.rmtree(place, ignore_errors=True)


def _print_estimate(job: Job, storage: LocalStorage, recorded: StoreRecord | None) -> None:
    """Count the tokens of the whole source, from the store where it has them, and print what they amount to."""
    schema = job.new_record.schema
    rows: Sequence[int]
    if recorded is not None and recorded.phase != "tokens":
        check_identity(recorded, job)
        index = StoreIndex(storage, recorded)
        rows = range(recorded.schema.num_samples)
        if not recorded.complete:
            missing = missing_shards(storage, recorded.schema)
            rows = [row for shard in missing for row in recorded.schema.tokens.rows(shard)]
        volume = Volume.of(schema, index.length[rows].tolist(), index.supervised[rows].tolist())
    else:
        lengths, supervised = np.zeros(len(job.source), np.int64), np.zeros(len(job.source), np.int64)
        with Progress("tokenise", len(job.source), "rows") as progress:
            for position, sample in enumerate(job.source.read()):
                lengths[position], supervised[position] = len(sample.input_ids), int(sample.loss_mask.sum())
                progress.advance(1)
        volume = Volume.of(schema, lengths.tolist(), supervised.tolist())
    rate = job.config.tokens_per_second or _recorded_rate(recorded)
    for line in estimate_lines(schema, job.new_record.last_layer, volume, storage.free_bytes(), rate):
        print(line)


def _recorded_rate(recorded: StoreRecord | None) -> float | None:
    rates = [producer.get("tokens_per_second") for producer in recorded.producers] if recorded else []
    known = [float(rate) for rate in rates if isinstance(rate, int | float) and rate > 0]
    return known[-1] if known else None
