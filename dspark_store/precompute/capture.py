"""Phase 2: every shard without a ledger row is read back as tokens, run through the target, and written."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import StoreSchema
from dspark_store.format.storage import Storage
from dspark_store.precompute.batches import batches_of
from dspark_store.precompute.progress import Progress, size_text
from dspark_store.target.capture import CapturedStates
from dspark_store.writers.pipeline import EncodePipeline
from dspark_store.writers.states import NonFiniteError, ShardReport, StateShardWriter, state_ledger
from dspark_store.writers.tokens import TokenRows, read_token_shard

type Capture = Callable[[torch.Tensor, torch.Tensor], CapturedStates]


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """How the target is run: where, how many samples a forward, the id that pads a batch, the last layer's id."""

    device: torch.device
    batch_size: int
    pad_token_id: int
    last_layer: int
    stop_on_nonfinite: bool


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What one job captured."""

    shards: int
    tokens: int
    stored_bytes: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Valid tokens a second, writing included; 0 when nothing was captured."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def missing_shards(storage: Storage, schema: StoreSchema) -> list[int]:
    """Return the shards whose states are not committed, wherever the holes are."""
    committed = set(state_ledger(storage, schema).committed())
    return [shard for shard in range(schema.tokens.num_shards) if shard not in committed]


def forward_batch(
    capture: Capture, settings: CaptureSettings, dtype: torch.dtype, rows: TokenRows, batch: Sequence[int]
) -> CapturedStates:
    """Run one batch of a shard's rows, padded right to its longest; return states (B, longest, H) on the CPU.

    States of a device are cast to the cache ``dtype`` there, which halves what is copied.
    """
    width = max(1, *(rows.lengths[row] for row in batch))
    ids = torch.full((len(batch), width), settings.pad_token_id)
    attention = torch.zeros((len(batch), width), dtype=torch.int64)
    for position, row in enumerate(batch):
        length = rows.lengths[row]
        ids[position, :length] = torch.from_numpy(rows.ids[row].astype(np.int64))
        attention[position, :length] = 1
    states = capture(ids.to(settings.device), attention.to(settings.device))
    last = _to_host(states.last, dtype)
    layers = tuple(last if layer is states.last else _to_host(layer, dtype) for layer in states.layers)
    return CapturedStates(layers, last)


def _to_host(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return states if states.device.type == "cpu" else states.to(dtype).cpu()


class ShardCapture:
    """Runs shards of a store through the target."""

    def __init__(
        self,
        storage: Storage,
        record: StoreRecord,
        capture: Capture,
        settings: CaptureSettings,
        pipeline: EncodePipeline,
    ) -> None:
        self._storage = storage
        self._record = record
        self._capture = capture
        self._settings = settings
        self._pipeline = pipeline
        layer_ids = record.schema.layer_ids
        last = settings.last_layer
        self._shared_slot = layer_ids.index(last) if last in layer_ids else None

    def run(self, shard: int, on_batch: Callable[[int], None]) -> ShardReport:
        """Capture and commit one shard; ``on_batch`` is told the valid tokens of every batch."""
        rows = read_token_shard(self._storage, self._record, shard)
        writer = StateShardWriter(
            self._storage,
            self._record,
            shard,
            rows=len(rows),
            tokens=rows.digest,
            pipeline=self._pipeline,
            shared_slot=self._shared_slot,
        )
        try:
            for batch in batches_of(rows.lengths, self._settings.batch_size):
                states = forward_batch(
                    self._capture, self._settings, self._record.schema.dtype.torch_dtype, rows, batch
                )
                for position, row in enumerate(batch):
                    length = rows.lengths[row]
                    layers = [layer[position, :length] for layer in states.layers]
                    writer.add(row, layers, states.last[position, :length])
                self._check_finite(writer, shard)
                on_batch(sum(rows.lengths[row] for row in batch))
            self._pipeline.flush()
            self._check_finite(writer, shard)
            return writer.commit()
        except BaseException:
            writer.abort()
            raise

    def _check_finite(self, writer: StateShardWriter, shard: int) -> None:
        bad = writer.nonfinite_rows()
        if bad and self._settings.stop_on_nonfinite:
            sample = shard * self._record.schema.shard_size + min(bad)
            raise NonFiniteError(
                f"states of sample {sample} are not finite in {self._record.schema.dtype.name}; "
                "use --on-nonfinite mark to keep going, or another --dtype"
            )


def capture_states(
    storage: Storage,
    record: StoreRecord,
    capture: Capture,
    settings: CaptureSettings,
    pipeline: EncodePipeline,
    lengths: Sequence[int],
) -> CaptureReport:
    """Capture and commit every missing shard. ``lengths`` are the tokens of all N samples, for the progress."""
    shards = missing_shards(storage, record.schema)
    counts = {shard: sum(lengths[row] for row in record.schema.tokens.rows(shard)) for shard in shards}
    todo, everything = sum(counts.values()), sum(lengths)
    job = ShardCapture(storage, record, capture, settings, pipeline)
    started = time.monotonic()
    finished_tokens = stored = 0
    with Progress("capture", everything, "tokens", everything - todo) as progress:
        for shard in shards:
            note = _note(stored, finished_tokens, todo, time.monotonic() - started)
            stored += job.run(shard, lambda tokens, note=note: progress.advance(tokens, note)).stored_bytes  # type: ignore[misc]
            finished_tokens += counts[shard]
    return CaptureReport(len(shards), todo, stored, time.monotonic() - started)


def _note(stored: int, tokens: int, todo: int, seconds: float) -> str:
    if not stored:
        return "size to come not known yet"
    return f"{size_text(stored / seconds)}/s written, about {size_text(stored / tokens * todo)} in all"
