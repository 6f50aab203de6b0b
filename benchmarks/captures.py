"""The capture loop under measurement: the same batches run by a target alone, with copies, and with writing."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import batched
from pathlib import Path
from typing import cast

import numpy as np
import torch

from benchmarks.samples import write_tokens
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import StoreSchema
from dspark_store.format.storage import LocalStorage
from dspark_store.format.token_shards import read_token_shard
from dspark_store.precompute.capture import (
    CaptureContext,
    CaptureEvents,
    CaptureSettings,
    capture_shards,
    missing_shards,
)
from dspark_store.precompute.copies import HostCopies, HostCopy
from dspark_store.precompute.crew import ControlGroups, Crew, own_objects
from dspark_store.precompute.ranks import World
from dspark_store.precompute.rendezvous import Keys
from dspark_store.precompute.report import Profile
from dspark_store.precompute.watch import Watch
from dspark_store.target.batches import batches_of, padded_batch
from dspark_store.target.capture import StageCapture, StageStates
from dspark_store.target.parallel import ParallelPlan
from dspark_store.writers.pipeline import EncodePipeline

BUFFER_BYTES = 512 * 2**20
"""The command's default of ``--write-buffer-bytes``."""


@dataclass(frozen=True, slots=True)
class CaptureWork:
    """A store that has its tokens and none of its states, and how its states are captured."""

    storage: LocalStorage
    record: StoreRecord
    settings: CaptureSettings
    encode_threads: int

    @property
    def tokens(self) -> int:
        """Valid tokens of all samples."""
        shards = range(self.record.schema.tokens.num_shards)
        return sum(sum(read_token_shard(self.storage, self.record, shard).lengths) for shard in shards)

    def copied(self, place: Path) -> CaptureWork:
        """Return the same workload on a copy of the store in ``place``, a new directory."""
        shutil.copytree(self.storage.root, place)
        return self.at(place)

    def at(self, place: Path) -> CaptureWork:
        """Return the same workload whose store is in ``place``."""
        return replace(self, storage=LocalStorage(place))

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield ids and attention mask, (B, longest) int64, of every batch in the order of the capture."""
        vocab_size = cast(int, self.record.manifest["target_vocab_size"])
        for shard in range(self.record.schema.tokens.num_shards):
            rows = read_token_shard(self.storage, self.record, shard)
            for batch in batches_of(rows.lengths, self.settings.batch_limit):
                yield padded_batch(rows, batch, self.settings.pad_token_id, vocab_size)


def new_workload(
    place: Path,
    schema: StoreSchema,
    lengths: Sequence[int],
    settings: CaptureSettings,
    *,
    vocab_size: int,
    encode_threads: int,
) -> CaptureWork:
    """Write random ids, one sample of each length, as the token shards of a new store in ``place``."""
    storage, random = LocalStorage(place), np.random.default_rng(0)
    facts = {
        "pad_token_id": settings.pad_token_id,
        "num_hidden_layers": settings.last_layer + 1,
        "target_vocab_size": vocab_size,
    }
    ids = [random.integers(0, vocab_size, length, np.int32) for length in lengths]
    shards = [list(part) for part in batched(ids, schema.shard_size)]
    record = write_tokens(storage, StoreRecord("0" * 32, schema, manifest=facts), shards)
    return CaptureWork(storage, record, settings, encode_threads)


def run_forwards(workload: CaptureWork, capture: StageCapture) -> None:
    """Run every batch and drop its states."""
    for _ in _captured(workload, capture):
        pass


def run_copies(workload: CaptureWork, capture: StageCapture) -> None:
    """Run every batch, bring its states to the host as a capture does, and drop them there."""
    copies = HostCopies(workload.settings.device, workload.record.schema.dtype.torch_dtype)
    under_way: deque[HostCopy] = deque()
    for states in _captured(workload, capture):
        under_way.append(copies.start(states))
        while len(under_way) > copies.depth:
            under_way.popleft().wait()
    while under_way:
        under_way.popleft().wait()


def _captured(workload: CaptureWork, capture: StageCapture) -> Iterator[StageStates]:
    device = workload.settings.device
    for ids, attention in workload.batches():
        yield capture(ids.to(device), attention.to(device))


def run_writing(workload: CaptureWork, capture: StageCapture) -> int:
    """Capture and commit every shard as a job of one process does; return the stored bytes of the states."""
    storage, record, plan = workload.storage, workload.record, ParallelPlan(1)
    schema, settings = record.schema, workload.settings
    stored: list[int] = []
    with (
        Watch(0, 1, None) as watch,
        EncodePipeline(workload.encode_threads, BUFFER_BYTES) as pipeline,
    ):
        world = World(0, 1, 0, Keys(), watch)
        shards = missing_shards(storage, schema)
        context = CaptureContext(
            storage,
            record,
            capture,
            settings,
            own_objects(schema, plan, 0, settings.last_layer + 1),
            pipeline,
            HostCopies(settings.device, schema.dtype.torch_dtype),
            Profile(),
        )
        events = CaptureEvents(
            batch=lambda _: None,
            committed=lambda _, nbytes: stored.append(nbytes),
            before_commit=lambda: None,
            progress=watch.progress,
        )
        capture_shards(context, Crew(world, plan, ControlGroups(None, None), schema, shards), events)
    return sum(stored)
