"""The loader: random batches of a store, read ahead by threads, in an order that resumes exactly."""

from __future__ import annotations

import logging
import operator
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Self

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from dspark_store.format.schema import COLUMNS
from dspark_store.readers.cache import Cache, open_cache
from dspark_store.readers.epoch import (
    BatchRequest,
    Epoch,
    EpochPlanner,
    PackedEpoch,
    Shape,
    Side,
    Split,
    choose_samples,
)
from dspark_store.readers.order import EndRule, LoaderState
from dspark_store.readers.packing import LongPolicy
from dspark_store.readers.tensors import (
    BatchMemory,
    DeviceCopy,
    Layout,
    chosen_columns,
    chosen_slots,
    chosen_span,
    decoded,
    read_shape,
)
from dspark_store.readers.threads import Ahead, Pending, Prefetcher

type Batch = dict[str, torch.Tensor]

DEFAULT_PREFETCH_BYTES = 512 * 1024 * 1024
_AS_IT_IS = "iterate the loader itself or write DataLoader(loader, batch_size=None)"
_log = logging.getLogger(__name__)


class CacheLoader(IterableDataset[Batch]):
    """Batches of a store, for training: iterate it once an epoch, one iteration at a time.

    A batch is a dict of tensors: the chosen ``columns`` with a first axis of ``batch_size``; for rows of one sample
    also ``sample`` and ``length``, (B,) int64; for packed rows the fields of `PackedFields`. Its memory is used again
    once no tensor of it is left. The order of an epoch is a pure function of seed and epoch; every rank yields the same
    number of batches; the position is exact to the batch, see `state_dict`.

    Args:
        cache: a complete store, or its path.
        batch_size: rows per batch and rank.
        shuffle: False for the order of the store.
        seed: 0 to 2^64 - 1; with the epoch it decides the order.
        window_shards: shuffle the shards, then the samples in each window of so many shards; None shuffles all samples.
        last: what happens to a last batch that is not full: "drop", "short", "even" or "repeat", see `BatchPlan`.
        shape: "full" rows have S positions, "longest" those of the batch's longest sample, "packed" rows several
            samples in ``budget`` tokens.
        budget: tokens per packed row.
        long_samples: what becomes of samples over the budget: "cut" or "leave_out".
        columns: the columns of a batch.
        layers: captured layers by id, in this order; None for all.
        positions: the slice of every row that a sequence-parallel rank wants.
        layout: that of ``target_hidden_states``: "flat", (B, S, K*H), or "stacked", (B, K, S, H).
        dtype: that of the states; None for the cache dtype.
        dequantise: False gives the codes of an int8 store, W values in place of H: see `split_codes`. With a CUDA
            ``device`` codes are copied there in any case, and multiplied there.
        min_supervised: samples with fewer supervised tokens are left out, as those with non-finite states are; the log
            counts them.
        split: "train" or "validation": one side of a split by content; needs ``validation_fraction``.
        validation_fraction: the part of the samples that is for validation, the same ones however the corpus grows.
        split_seed: chooses which ones.
        sources: names of the blend's sources to load from; None for all.
        dp_rank: this process among the data-parallel ranks; by default that of ``mesh``, or of the default process
            group.
        dp_size: the number of data-parallel ranks; given together with ``dp_rank``.
        mesh: a device mesh of one dimension, the data-parallel one.
        prefetch_bytes: bytes of batches that are read ahead, at most; one batch always is. Token columns that take at
            most 64 MiB together are read whole at the start, and kept until `close`.
        device: a CUDA device to copy batches to, on a stream of its own; None or the CPU for none.
        index_fields: whether rows of one sample come with ``sample`` and ``length``.

    Raises:
        ValueError: the store is incomplete, no sample is left, or options do not fit together; says which.
    """

    def __init__(
        self,
        cache: Cache | str | os.PathLike[str],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        window_shards: int | None = None,
        last: EndRule = "drop",
        shape: Shape = "full",
        budget: int | None = None,
        long_samples: LongPolicy = "cut",
        columns: Sequence[str] = COLUMNS,
        layers: Sequence[int] | None = None,
        positions: slice | None = None,
        layout: Layout = "flat",
        dtype: torch.dtype | None = None,
        dequantise: bool = True,
        min_supervised: int = 1,
        split: Side | None = None,
        validation_fraction: float = 0.0,
        split_seed: int = 0,
        sources: Sequence[str] | None = None,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        mesh: DeviceMesh | None = None,
        prefetch_bytes: int = DEFAULT_PREFETCH_BYTES,
        device: torch.device | str | None = None,
        index_fields: bool = True,
    ) -> None:
        super().__init__()
        if prefetch_bytes < 1:
            raise ValueError(f"prefetch_bytes must be >= 1, got {prefetch_bytes}")
        if shape == "packed" and positions is not None:
            raise ValueError("packed rows are read whole: positions cannot be given with shape 'packed'")
        if split is None and validation_fraction:
            raise ValueError(f"validation_fraction {validation_fraction} needs split='train' or split='validation'")
        if isinstance(cache, str | os.PathLike):
            cache = open_cache(cache)
        if not cache.can_train:
            raise ValueError(f"store at {cache.storage} is incomplete: finish it before training from it")
        self.cache = cache
        self.batch_size = batch_size
        self.seed = operator.index(seed)
        self.last: EndRule = last
        self.dp_rank, self.dp_size = resolve_ranks(dp_rank, dp_size, mesh)
        self.epoch = 0
        self._planner = EpochPlanner(
            batch_size=batch_size,
            dp_size=self.dp_size,
            shuffle=shuffle,
            seed=self.seed,
            shard_size=cache.schema.shard_size,
            window_shards=window_shards,
            last=last,
            shape=shape,
            budget=budget,
            long_samples=long_samples,
            span=chosen_span(cache.schema, positions),
            index_fields=index_fields,
        )
        self._slots = chosen_slots(cache.schema, layers)
        self._columns = chosen_columns(columns)
        read_shape(cache.schema, dtype, dequantise=dequantise)
        coded = dequantise and cache.schema.int8 is not None
        self._copy = DeviceCopy.to(device, partial(decoded, cache.schema, self._slots, dtype) if coded else None)
        if self._copy.decodes:
            dequantise, dtype = False, None
        schema = cache.schema if dequantise else cache.schema.stored
        self._memory = BatchMemory(schema, self._columns, len(self._slots), layout, dtype)
        self._prefetch_bytes = prefetch_bytes
        sides = None if split is None else Split(split, validation_fraction, split_seed)
        if sides is not None and not validation_fraction:
            raise ValueError(f"split={split!r} needs a validation_fraction above 0, the part that is for validation")
        self._samples = choose_samples(cache, min_supervised=min_supervised, split=sides, sources=sources)
        self._stream = self._planner.digest(self._samples)
        self._steps_done = 0
        self._resumed = False
        self._planned: tuple[int, Epoch] | None = None
        self._running: Prefetcher[Batch] | None = None
        repeated = self._planner.batches(len(self._samples)).repeated
        if repeated and shape != "packed":
            _log.info("an epoch repeats %d samples to fill its last batch on every rank", repeated)

    def __repr__(self) -> str:
        rank = f"rank={self.dp_rank} of {self.dp_size}"
        return f"CacheLoader({self.cache!r}, batch_size={self.batch_size}, samples={len(self._samples)}, {rank})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def samples(self) -> np.ndarray:
        """The samples that are loaded, ascending int64."""
        return self._samples

    @property
    def dataset(self) -> Cache:
        """The store, under the name that torch's DataLoader gives it."""
        return self.cache

    @property
    def sampler(self) -> Self:
        """This loader: scripts call ``loader.sampler.set_epoch``."""
        return self

    def __len__(self) -> int:
        """Batches that this epoch yields, on every rank."""
        return self._plan().batches.steps

    def epoch_samples(self) -> np.ndarray:
        """Return the samples of this rank's batches in this epoch, one batch after the other, int64."""
        plan = self._plan()
        batches = [plan.samples(step, self.dp_rank) for step in range(plan.batches.steps)]
        return np.concatenate([np.empty(0, np.int64), *batches])

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration begin an epoch; without this, each one begins the epoch after the last finished one.

        An iteration that was left early is begun again, as torch's DataLoader does it; after `load_state_dict` the next
        one goes on, also when this names the same epoch.
        """
        if epoch != self.epoch:
            self.epoch, self._steps_done, self._resumed = epoch, 0, False

    def state_dict(self) -> dict[str, int | str]:
        """Return the position: the epoch, and what all ranks have taken of it. The same on every rank."""
        state = LoaderState.after(self._plan().batches, epoch=self.epoch, steps=self._steps_done)
        return {
            "epoch": state.epoch,
            "consumed": state.consumed,
            "count": state.count,
            "global_batch": state.global_batch,
            "seed": self.seed,
            "stream": self._stream,
        }

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Go on where a loader stood, under any world size with the same global batch.

        Args:
            state: what `state_dict` returned, on any rank.

        Raises:
            ValueError: the stream would be another: other seed, samples, order, shape of rows or global batch.
        """
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise ValueError(f"this is no state of a CacheLoader: it lacks {', '.join(sorted(missing))}")
        if state["seed"] != self.seed:
            raise ValueError(f"the state was saved with seed {state['seed']}, this loader has {self.seed}")
        position = LoaderState(*(int(state[name]) for name in ("epoch", "consumed", "count", "global_batch")))
        self._stop()
        before, self.epoch = self.epoch, position.epoch
        try:
            steps = position.steps_done(self._plan().batches)
            if state["stream"] != self._stream:
                raise ValueError(
                    "the state was saved by a loader of another stream: other samples, order, end rule or rows"
                )
        except ValueError:
            self.epoch = before
            raise
        self._steps_done, self._resumed = steps, True

    def __iter__(self) -> Iterator[Batch]:
        if get_worker_info() is not None:
            raise ValueError(f"a CacheLoader reads ahead in threads of its own: use it with num_workers=0, {_AS_IT_IS}")
        taker = sys._getframe(1)  # a generator runs first in whoever takes its first batch; torch looks for no method
        torchs = taker.f_code.co_qualname == "_IterableDatasetFetcher.fetch"  # locals of other frames would be kept
        fetcher = taker.f_locals["self"] if torchs else None
        del taker
        if getattr(fetcher, "auto_collation", False) and getattr(fetcher, "collate_fn", None) is default_collate:
            raise ValueError(f"a CacheLoader gives batches already, do not batch them again: {_AS_IT_IS}")
        self._stop()
        if not self._resumed:
            self._steps_done = 0
        self._resumed = False
        number, epoch = self.epoch, self._plan()
        if epoch.batches.steps == 0:
            raise ValueError(
                f"the epoch has no batch: {epoch.batches.count} items are fewer than the {epoch.batches.global_batch} "
                "of one global batch, and last='drop' drops them"
            )
        largest = self._memory.nbytes(self.batch_size, self._planner.row_length)
        self._memory.open(self._prefetch_bytes + 2 * largest)
        running = Prefetcher(self._work(epoch, self._steps_done), self._prefetch_bytes)
        self._running = running
        try:
            for batch in running:
                if self.epoch == number:  # set_epoch holds from the next iteration on
                    self._steps_done += 1
                yield self._copy.receive(batch)
                del batch
            if self._running is running and self.epoch == number:
                self.epoch, self._steps_done = number + 1, 0
        finally:
            if self._running is running:
                self._stop()

    def close(self) -> None:
        """Stop, and let go of threads, files and buffers. An iteration under way ends."""
        self._stop()
        self.cache.close()

    def _stop(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None
        self._memory.close()

    def _work(self, epoch: Epoch, first: int) -> Iterator[Ahead[Batch]]:
        self.cache.reader.keep_tokens(self._columns)
        for step in range(first, epoch.batches.steps):
            request = epoch.request(step, self.dp_rank)
            nbytes = self._memory.nbytes(request.rows, request.length)
            yield Ahead(nbytes, lambda request=request: self._start(request))  # type: ignore[misc]

    def _plan(self) -> Epoch:
        """Return the current epoch's batches, planned once."""
        if self._planned is None or self._planned[0] != self.epoch:
            self._planned = (self.epoch, self._plan_epoch(self.epoch))
        return self._planned[1]

    def _plan_epoch(self, number: int) -> Epoch:
        epoch = self._planner.plan(number, self._samples, self.cache.lengths)
        if isinstance(epoch, PackedEpoch):
            _log.info(
                "%d packed rows in epoch %d; %d samples are cut to the budget, %d longer and %d empty ones left out",
                len(epoch.plan),
                number,
                epoch.plan.cut,
                epoch.plan.left_out,
                epoch.plan.empty,
            )
        return epoch

    def _start(self, request: BatchRequest) -> Pending[Batch]:
        batch = self._memory.lease(request.rows, request.length)
        fields = {name: torch.from_numpy(values) for name, values in request.fields.items()}
        return self.cache.reader.start(request.spans, self._slots, batch, lambda: self._copy(batch | fields))


def resolve_ranks(dp_rank: int | None, dp_size: int | None, mesh: DeviceMesh | None) -> tuple[int, int]:
    """Return (rank, size): as given; else of a one-dimensional device mesh; else of the default process group, if any.

    ValueError when only one of the two is given, the rank is outside the size, or the mesh has several dimensions.
    """
    if (dp_rank is None) != (dp_size is None):
        raise ValueError(f"give dp_rank and dp_size together, got {dp_rank} and {dp_size}")
    if dp_rank is not None and dp_size is not None:
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank {dp_rank} is outside the {dp_size} ranks")
        return dp_rank, dp_size
    if mesh is not None:
        if mesh.ndim != 1:
            raise ValueError(f"the mesh has dimensions {mesh.mesh_dim_names}: give the data-parallel one, mesh['dp']")
        return mesh.get_local_rank(), mesh.size()
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
