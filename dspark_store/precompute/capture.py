"""Phase 2: every shard without a ledger row is read back as tokens, run through the target, and written."""

from __future__ import annotations

import platform
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import cast

import torch
import zarr

from dspark_store.format.int8 import AIMS, LayerScale, calibrate, spread
from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.ledger import state_ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import LAST, StateObject, StoreSchema
from dspark_store.format.storage import Storage
from dspark_store.format.token_shards import read_token_shard
from dspark_store.precompute.copies import HostCopies, HostCopy
from dspark_store.precompute.crew import Crew
from dspark_store.precompute.report import Profile
from dspark_store.target.batches import BatchLimit, batches_of, padded_batch
from dspark_store.target.capture import StageCapture, StageStates
from dspark_store.writers.pipeline import EncodePipeline
from dspark_store.writers.states import FinishedObjects, NonFiniteError, StateShardWriter, publish_states

_DUMMY_TOKENS = 8


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """How the target is run: where, what bounds a batch, the id that pads a batch, the last layer's id."""

    device: torch.device
    batch_limit: BatchLimit
    pad_token_id: int
    last_layer: int
    stop_on_nonfinite: bool


def missing_shards(storage: Storage, schema: StoreSchema) -> list[int]:
    """Return the shards whose states are not committed, wherever the holes are."""
    committed = set(state_ledger(storage, schema).committed())
    return [shard for shard in range(schema.tokens.num_shards) if shard not in committed]


def costly_first(costs: Mapping[int, int]) -> list[int]:
    """Return shards by falling cost, equal ones by number: the last ones that workers take are then short."""
    return sorted(costs, key=lambda shard: (-costs[shard], shard))


def check_equality_class(storage: Storage, record: StoreRecord, own: str, *, allow: bool) -> None:
    """Raise ValueError when shards of the store were captured in another class, unless that is allowed."""
    others = {str(producer["equality_class"]) for producer in record.producers if "equality_class" in producer} - {own}
    if others and not allow and state_ledger(storage, record.schema).committed():
        raise ValueError(
            f"the store was begun in the equality class {min(others)!r} and this run is in {own!r}: its states may "
            "differ in the last bits; run it as it was begun, or allow that with --mix-equality-classes"
        )


def with_producer(record: StoreRecord, facts: Mapping[str, JsonValue], **libraries: str) -> StoreRecord:
    """Return the record with one more producer: who it is, and the versions that it runs."""
    producer: dict[str, JsonValue] = {
        "host": platform.node(),
        **facts,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **libraries,
        "zarr": zarr.__version__,
    }
    return replace(record, producers=(*record.producers, producer))


@dataclass(frozen=True, slots=True)
class CaptureContext:
    """What the capture of every shard has in common. ``objects`` are those of a shard that this rank writes."""

    storage: Storage
    record: StoreRecord
    capture: StageCapture
    settings: CaptureSettings
    objects: Sequence[StateObject]
    pipeline: EncodePipeline
    copies: HostCopies
    profile: Profile

    @property
    def vocab_size(self) -> int:
        """Rows of the target's embedding: an id at or past it would end a CUDA device's whole context."""
        return cast(int, self.record.manifest["target_vocab_size"])

    def forward(self, ids: torch.Tensor, attention: torch.Tensor) -> HostCopy:
        """Run one batch, and start the copy of its states to the host."""
        device = self.settings.device
        with self.profile.timed("forward"):
            states = self.capture(ids.to(device), attention.to(device))
        return self.copies.start(states)

    def calibrate(self) -> dict[str, LayerScale]:
        """Run batches of the first shard, evenly spread, and return the scales of this rank's objects, by name."""
        schema, settings = self.record.schema, self.settings
        samples: dict[StateObject, list[torch.Tensor]] = {item: [] for item in self.objects}
        if schema.num_samples:
            rows = read_token_shard(self.storage, self.record, 0)
            batches = batches_of(rows.lengths, settings.batch_limit)
            for place in spread([sum(rows.lengths[row] for row in batch) for batch in batches]):
                batch = batches[place]
                states = self.forward(*padded_batch(rows, batch, settings.pad_token_id, self.vocab_size)).wait()
                layers: dict[int | None, torch.Tensor | None] = dict(zip(states.slots, states.layers, strict=True))
                layers[None] = states.last
                for item, kept in samples.items():
                    layer = cast(torch.Tensor, layers[None if item.column == LAST else item.slot])
                    kept.extend(layer[at, : rows.lengths[row]].clone() for at, row in enumerate(batch))
        aim = AIMS[str(schema.int8)]
        return {item.name: calibrate(kept, schema.hidden_size, aim) for item, kept in samples.items()}

    def run_dummy(self) -> None:
        """Take part in a forward without work of one's own; what comes out is dropped."""
        ids = torch.full((1, _DUMMY_TOKENS), self.settings.pad_token_id)
        self.forward(ids, torch.ones_like(ids)).wait()


class ShardCapture:
    """One shard on its way through the target: batch by batch, then its objects, then the commit."""

    def __init__(self, context: CaptureContext, shard: int) -> None:
        self._context = context
        self.shard = shard
        self._rows = read_token_shard(context.storage, context.record, shard)
        self._batches = deque(batches_of(self._rows.lengths, context.settings.batch_limit))
        self._inputs = self._next_inputs()
        self._copies: deque[tuple[HostCopy, Sequence[int]]] = deque()
        self._writer: StateShardWriter | None = None
        if context.objects:
            self._writer = StateShardWriter(
                context.storage,
                context.record,
                shard,
                rows=len(self._rows),
                tokens=self._rows.digest,
                pipeline=context.pipeline,
                shared_slot=context.record.shared_slot,
                objects=context.objects,
            )

    @property
    def captured(self) -> bool:
        """Whether every batch has been run."""
        return not self._batches

    def step(self) -> int:
        """Run the next batch; return its valid tokens."""
        batch = self._batches.popleft()
        copy = self._context.forward(*self._inputs)
        self._inputs = self._next_inputs()  # before the encoders have anything to do, which would compete with this
        if self._writer is not None:
            self._copies.append((copy, batch))
            if not self.captured:  # `store` or `drain` stores what is left
                self._store_copies(self._context.copies.depth)
            self._check_finite()
        return sum(self._rows.lengths[row] for row in batch)

    def _next_inputs(self) -> tuple[torch.Tensor, ...]:
        """Return ids and attention mask of the next batch; nothing behind the last one."""
        pad, vocab_size = self._context.settings.pad_token_id, self._context.vocab_size
        return padded_batch(self._rows, self._batches[0], pad, vocab_size) if self._batches else ()

    @property
    def tokens(self) -> int:
        """Valid tokens of the shard."""
        return sum(self._rows.lengths)

    def finish(self, progress: Callable[[], None]) -> FinishedObjects | None:
        """Make a drained shard's objects durable, telling ``progress`` of each; None when this rank writes none."""
        return None if self._writer is None else self._writer.finish(progress)

    def store(self) -> None:
        """Give the encoders all that was captured."""
        self._store_copies(0)

    def drain(self) -> None:
        """Wait until all states are encoded; NonFiniteError where the job is to stop at values that are not finite."""
        if self._writer is not None:
            self.store()
            self._writer.drain()
            self._check_finite()

    def abort(self) -> None:
        """Drop the shard; nothing of it was visible."""
        if self._writer is not None:
            self._writer.abort()

    def _store_copies(self, keep: int) -> None:
        profile = self._context.profile
        while self._writer is not None and len(self._copies) > keep:
            copy, batch = self._copies.popleft()
            with profile.timed("copy"):
                states = copy.wait()
            with profile.timed("wait"):
                self._add(self._writer, states, batch)

    def _add(self, writer: StateShardWriter, states: StageStates, batch: Sequence[int]) -> None:
        for position, row in enumerate(batch):
            length = self._rows.lengths[row]
            layers: list[torch.Tensor | None] = [None] * self._context.record.schema.num_layers
            for slot, layer in zip(states.slots, states.layers, strict=True):
                layers[slot] = layer[position, :length]
            last = None if states.last is None else states.last[position, :length]
            writer.add(row, layers, last, more=position + 1 < len(batch))

    def _check_finite(self) -> None:
        bad = self._writer.nonfinite_rows() if self._writer is not None else set()
        if bad and self._context.settings.stop_on_nonfinite:
            schema = self._context.record.schema
            raise NonFiniteError(
                f"states of sample {self.shard * schema.shard_size + min(bad)} are not finite in {schema.dtype.name}; "
                "use --on-nonfinite mark to keep going, or another --dtype"
            )


@dataclass(frozen=True, slots=True)
class CaptureEvents:
    """What a capture tells: the valid tokens of every batch, the valid tokens and stored bytes of every commit.

    ``before_commit`` is asked before each object becomes visible and before the ledger row does, ``progress`` after
    each batch; both may raise to stop. ``committed`` and ``before_commit`` are called on the thread that commits.
    """

    batch: Callable[[int], None]
    committed: Callable[[int, int], None]
    before_commit: Callable[[], None]
    progress: Callable[[], None]


def capture_shards(context: CaptureContext, crew: Crew, events: CaptureEvents) -> None:
    """Take shards as long as there are some, and capture them; then help those that step together to end.

    A shard is committed in a thread while the next one's forwards run, so two shards are under way at most. A commit
    that fails is raised before another shard is begun, and none is committed behind it. When anything else fails, the
    commit under way comes to its end first, unless other ranks may have to hear of the failure for that.
    """
    shard: ShardCapture | None = None
    with ThreadPoolExecutor(1, "commit") as thread:
        commits = _Commits(context, crew, events, thread)
        try:
            number = crew.next_shard()
            while crew.any_works(works=number is not None):
                if number is None:
                    context.run_dummy()
                else:
                    shard = shard or ShardCapture(context, number)
                    events.batch(shard.step())
                    if shard.captured:
                        if commits.busy:
                            shard.store()
                        commits.wait()  # two shards are under way at most, this one and the next
                        following: ShardCapture | None = None
                        try:  # its tokens are read before the encoders have this shard's last batches
                            number = crew.next_shard()
                            following = None if number is None else ShardCapture(context, number)
                        finally:
                            commits.begin(shard)
                        shard = following
                events.progress()
                commits.check()
            commits.wait()
        except BaseException as error:
            failure = commits.end()
            if shard is not None:
                shard.abort()
            if failure is not None and isinstance(error, Exception):
                raise failure from failure.__cause__  # of the earlier shard, whose bytes the other one waited behind
            raise


class _Commits:
    """Commits captured shards on a thread, one after the other."""

    def __init__(self, context: CaptureContext, crew: Crew, events: CaptureEvents, thread: ThreadPoolExecutor) -> None:
        self._context, self._crew, self._events, self._thread = context, crew, events, thread
        self._given_up = threading.Event()
        self._shard: ShardCapture | None = None
        self._last: Future[None] | None = None

    def begin(self, shard: ShardCapture) -> None:
        """Begin to commit a shard; the one before has been waited for."""
        self._shard = shard
        self._last = self._thread.submit(self._commit, shard)

    @property
    def busy(self) -> bool:
        """Whether a commit is under way."""
        return self._last is not None and not self._last.done()

    def check(self) -> None:
        """Raise the error of a commit that has failed."""
        if self._last is not None and self._last.done():
            self._last.result()

    def wait(self) -> None:
        """Wait for the commit under way; raise its error."""
        with self._context.profile.timed("commit"):
            if self._last is not None:
                self._last.result()

    def end(self) -> BaseException | None:
        """Let the commit under way come to its end, or give it up; drop what is not committed. Return its error."""
        if not self._crew.alone:
            self._given_up.set()
        self._thread.shutdown()
        if self._shard is not None:
            self._shard.abort()
        failure = None if self._last is None else self._last.exception()
        return None if isinstance(failure, CancelledError) else failure

    def _commit(self, shard: ShardCapture) -> None:
        shard.drain()
        self._may_go_on()

        def publish(parts: Sequence[FinishedObjects]) -> None:
            self._may_go_on()  # the objects may have taken long, and another job may have swept them by now
            report = publish_states(self._context.storage, self._context.record.schema, shard.shard, parts)
            self._events.committed(shard.tokens, report.stored_bytes)

        self._crew.commit(shard.shard, shard.finish(self._may_go_on), publish, self._may_go_on)

    def _may_go_on(self) -> None:
        if self._given_up.is_set():
            raise CancelledError
        self._events.before_commit()
