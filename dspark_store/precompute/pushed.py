"""Taking the states that any engine pushes, sample by sample; a shard is committed when all of it is there."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import TracebackType
from typing import Self, cast

import numpy as np
import torch

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.ledger import state_ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.metadata import write_metadata
from dspark_store.format.storage import LocalStorage
from dspark_store.format.token_shards import TokenRows, read_token_shard
from dspark_store.precompute.capture import costly_first, missing_shards
from dspark_store.readers.index import StoreIndex
from dspark_store.writers.lock import check_lock
from dspark_store.writers.pipeline import EncodePipeline
from dspark_store.writers.publish import complete_store
from dspark_store.writers.states import StateShardWriter
from dspark_store.writers.weights import write_weights

type States = torch.Tensor | np.ndarray


@dataclass(slots=True)
class _OpenShard:
    """A shard that waits for the states of ``left``, its rows."""

    number: int
    rows: TokenRows
    writer: StateShardWriter
    left: set[int]
    lock: threading.Lock = field(default_factory=threading.Lock)


class StoreWriter:
    """Takes the states of a store whose tokens are there; made by `create_store` and `join_store`.

    A shard is committed once all of its samples were added, on a thread of its own. What was not committed when the
    writer is left, or the process dies, is missing. An error of a commit is raised by the next call.
    """

    def __init__(
        self,
        storage: LocalStorage,
        record: StoreRecord,
        holder: str,
        todo: Sequence[int],
        held: ExitStack | None,
        buffer_bytes: int,
        open_shards: int,
    ) -> None:
        self._storage, self._record, self._holder, self._held = storage, record, holder, held
        self._todo = list(todo)
        self._lengths = [int(length) for length in StoreIndex(storage, record).length]
        self._most_open = open_shards
        self._open: dict[int, _OpenShard] = {}
        self._changed = threading.Condition()
        self._pipeline = EncodePipeline(min(8, os.cpu_count() or 1), buffer_bytes)
        self._thread = ThreadPoolExecutor(1, "commit")
        self._commits: list[Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drop the shards that are not whole, and give the lock back if this process holds it."""
        try:
            self._thread.shutdown()
            for shard in self._open.values():
                shard.writer.abort()
            self._pipeline.close()
        finally:
            if self._held is not None:
                self._held.close()

    @property
    def key(self) -> str:
        """What `join_store` takes, in this process's lifetime."""
        return json.dumps({"lock": self._holder, "todo": _ranges(self._todo)})

    def missing(self, worker: int = 0, workers: int = 1) -> list[int]:
        """Return the samples that one of so many workers is to capture, shard by shard, the costly ones first.

        Whole shards by tokens, and the same on every process that works on this `create_store`, whatever the others
        have done meanwhile. What is committed already is left out.
        """
        if not 0 <= worker < workers:
            raise ValueError(f"worker {worker} is not one of {workers}: expected 0 to {workers - 1}")
        rows = self._record.schema.tokens.rows
        costs = {shard: sum(self._lengths[row] for row in rows(shard)) for shard in self._todo}
        loads = [0] * workers
        mine: list[int] = []
        for shard in costly_first(costs):
            least = loads.index(min(loads))
            loads[least] += costs[shard]
            mine += [shard] if least == worker else []
        absent = set(missing_shards(self._storage, self._record.schema))
        return [sample for shard in mine if shard in absent for sample in rows(shard)]

    def input_ids(self, sample: int) -> np.ndarray:
        """Return the token ids of a sample, (length,) int32."""
        shard, row = self._place(sample)
        opened = self._open.get(shard)
        rows = read_token_shard(self._storage, self._record, shard) if opened is None else opened.rows
        return rows.ids[row].copy()

    def add(
        self,
        sample: int,
        layers: Mapping[int, States],
        last: States,
        *,
        token_ids: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        """Store the states of one sample, from any thread; they are copied.

        Args:
            sample: its number. `missing` gives these in an order in which few shards are open at once.
            layers: (length, H) for each layer id of the store, torch tensors or numpy arrays of floating point. The
                last layer's may be left out: its feature is `last`.
            last: the states after the final norm, (length, H).
            token_ids: what the engine says that it ran, checked against the store's tokens.

        Raises:
            ValueError: shapes, layers or tokens are not those of the sample, or it was added before, or its shard would
                be one more than may be open.
            LostLockError: another process has taken the store over.

        """
        number, row = self._place(sample)
        shard = self._shard(number, sample)
        if token_ids is not None:
            _check_ids(np.asarray(token_ids), shard.rows.ids[row], sample)
        tensors, final = self._checked(sample, layers, last)
        with shard.lock:
            if row not in shard.left:
                raise ValueError(f"the states of sample {sample} were added before")
            shard.writer.add(row, tensors, final)
            shard.left.remove(row)
            if not shard.left:
                with self._changed:
                    self._commits.append(self._thread.submit(self._commit, shard))

    def add_weights(
        self, embed: States, head: States | None = None, bias: States | None = None, **facts: JsonValue
    ) -> None:
        """Store the target's embedding (V, H), its head (V, H), None for a tied one, and the head's bias (V,).

        Training needs them. `facts` are `logit_scale`, `final_logit_softcapping` and `embedding_scale` where the target
        has such. Only the process that made the store may do this.
        """
        self._lead("add_weights")
        tables = [None if table is None else _tensor(table, "a weight") for table in (embed, head, bias)]
        none = dict.fromkeys(("logit_scale", "final_logit_softcapping", "embedding_scale"))
        tied = {"head_bias": bias is not None, "tied": head is None}
        record = replace(self._record, head={**tied, **none, **facts})
        embedding = cast(torch.Tensor, tables[0])
        check_lock(self._storage, self._holder)
        output = embedding if tables[1] is None else tables[1]
        self._record = write_weights(self._storage, record, embedding, output, tables[2], tied=head is None)
        write_metadata(self._storage, self._record)

    def flush(self) -> None:
        """Wait until every shard whose samples were all added is committed."""
        self._raise_failure(wait=True)

    def finish(self) -> None:
        """Wait until all that was added is committed; in the process that made the store, complete and seal it.

        Raises:
            ValueError: some samples are not there, of this process or of others; nothing is lost.

        """
        self.flush()
        if self._open:
            shard = min(self._open.values(), key=lambda shard: shard.number)
            first = shard.number * self._record.schema.shard_size + min(shard.left)
            raise ValueError(
                f"{sum(len(shard.left) for shard in self._open.values())} samples of {len(self._open)} begun shards "
                f"were not added, such as {first}: add them, or leave the writer to begin these shards anew"
            )
        if self._held is None or self._record.complete:
            return
        absent = missing_shards(self._storage, self._record.schema)
        if absent:
            raise ValueError(
                f"{len(absent)} shards have no states yet, such as {absent[0]}: wait for the other workers, or go on "
                "with create_store and the same arguments"
            )
        check_lock(self._storage, self._holder)
        self._record = complete_store(self._storage, self._record)

    def _lead(self, what: str) -> None:
        if self._held is None or self._record.complete:
            raise ValueError(f"{what} is for the process that made the store, before it is complete")

    def _place(self, sample: int) -> tuple[int, int]:
        if not 0 <= sample < len(self._lengths):
            raise ValueError(f"sample {sample} is not one of 0 to {len(self._lengths) - 1}")
        return divmod(sample, self._record.schema.shard_size)

    def _shard(self, number: int, sample: int) -> _OpenShard:
        """Return a shard that takes states, which is opened when it is first asked for."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._open or not self._is_full() or not self._commits_run())
            self._raise_failure()
            if number in self._open:
                return self._open[number]
            if self._storage.exists(state_ledger(self._storage, self._record.schema).key(number)):
                raise ValueError(f"the states of sample {sample} are in the store already")
            if self._is_full():
                raise ValueError(
                    f"sample {sample} is of shard {number}, and {self._most_open} shards are open already: add samples "
                    "in about the order of missing(), or let more shards be open"
                )
            rows = read_token_shard(self._storage, self._record, number)
            writer = StateShardWriter(
                self._storage,
                self._record,
                number,
                rows=len(rows),
                tokens=rows.digest,
                pipeline=self._pipeline,
                shared_slot=self._record.shared_slot,
            )
            self._open[number] = _OpenShard(number, rows, writer, set(range(len(rows))))
            return self._open[number]

    def _is_full(self) -> bool:
        return len(self._open) >= self._most_open

    def _commits_run(self) -> bool:
        return any(not commit.done() for commit in self._commits)

    def _raise_failure(self, *, wait: bool = False) -> None:
        """Raise the error of a commit that has failed, having waited for all of them if so asked."""
        for commit in list(self._commits):
            if wait or commit.done():
                commit.result()
                with suppress(ValueError):  # several threads may find it at once
                    self._commits.remove(commit)

    def _commit(self, shard: _OpenShard) -> None:
        try:
            shard.writer.commit(lambda: check_lock(self._storage, self._holder))
            with self._changed:
                del self._open[shard.number]
        finally:
            with self._changed:
                self._changed.notify_all()

    def _checked(
        self, sample: int, layers: Mapping[int, States], last: States
    ) -> tuple[list[torch.Tensor | None], torch.Tensor]:
        """Return copies of a sample's states in slot order, in the cache dtype, and its last ones."""
        schema, length = self._record.schema, self._lengths[sample]
        final_layer = self._record.last_layer
        unknown = set(layers) - set(schema.layer_ids)
        absent = set(schema.layer_ids) - set(layers) - {final_layer}
        if unknown or absent:
            raise ValueError(
                f"sample {sample} has states of layers {sorted(layers)}, the store has {list(schema.layer_ids)} "
                "(see convert_layer_ids)"
            )

        def copied(name: str, states: States) -> torch.Tensor:
            tensor = _tensor(states, f"{name} of sample {sample}")
            expected = (length, schema.hidden_size)
            if tuple(tensor.shape) != expected:
                raise ValueError(f"{name} of sample {sample} has shape {tuple(tensor.shape)}, expected {expected}")
            return tensor.detach().to("cpu", schema.dtype.torch_dtype, copy=True).contiguous()

        final = copied("the last state", last)
        tensors = {layer: copied(f"layer {layer}", states) for layer, states in layers.items()}
        if final_layer in tensors and not torch.equal(tensors[final_layer].nan_to_num(), final.nan_to_num()):
            raise ValueError(
                f"layer {final_layer} of sample {sample} is the target's last, whose feature is the state after the "
                "final norm, and it is not equal to the last state: an engine gives it before the norm; leave it out"
            )
        return [tensors.get(layer) for layer in schema.layer_ids], final


def _ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as [first, stop) each."""
    breaks = [place for place in range(1, len(numbers)) if numbers[place] != numbers[place - 1] + 1]
    edges = [0, *breaks, len(numbers)] if numbers else []
    return [(numbers[first], numbers[stop - 1] + 1) for first, stop in pairwise(edges)]


def _tensor(states: States, what: str) -> torch.Tensor:
    """Return states of floating point as a tensor; ValueError for others."""
    if isinstance(states, np.ndarray) and states.dtype.name == "bfloat16":
        states = torch.from_numpy(np.ascontiguousarray(states).view(np.int16)).view(torch.bfloat16)
    elif isinstance(states, np.ndarray) and states.dtype.kind == "f":
        states = torch.from_numpy(np.ascontiguousarray(states))
    if not isinstance(states, torch.Tensor) or not states.dtype.is_floating_point:
        raise ValueError(f"{what} must be a torch tensor or numpy array of floating point, got {type(states).__name__}")
    return states


def _check_ids(given: np.ndarray, stored: np.ndarray, sample: int) -> None:
    if given.shape != stored.shape:
        raise ValueError(f"the engine ran {given.shape} token ids for sample {sample}, the store has {len(stored)}")
    (differing,) = np.nonzero(given != stored)
    if len(differing):
        place = int(differing[0])
        raise ValueError(
            f"the engine ran token id {int(given[place])} at position {place} of sample {sample}, the store has "
            f"{int(stored[place])}: its states are of other tokens"
        )
