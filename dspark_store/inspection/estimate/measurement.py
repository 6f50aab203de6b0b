"""What real rows and the target's tables come to when they are encoded in every codec and dtype."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Self, cast

import numpy as np
import torch

from dspark_store.format.codecs import CODEC_PRESETS, state_chain
from dspark_store.format.dtypes import bits_tensor, cache_dtype, round_mantissa
from dspark_store.format.grid import default_chunk_tokens
from dspark_store.format.int8 import AIMS, calibrate, quantise
from dspark_store.format.schema import IDS, LAST, LAYERS, MASK, StoreSchema
from dspark_store.format.sizes import distinct_objects
from dspark_store.format.token_shards import TOKEN_VALUES, TokenRows
from dspark_store.inspection.samples import SampleTokens
from dspark_store.inspection.sizes import shares_tables
from dspark_store.precompute.job import Job
from dspark_store.precompute.job_target import JobTarget, plan_target
from dspark_store.precompute.ranks import join_world
from dspark_store.progress import start_progress
from dspark_store.readers.cache import Cache
from dspark_store.target.batches import batches_of, padded_batch
from dspark_store.target.capture import StageCapture

_TABLE_CHUNKS = 16
type RowStates = tuple[int, list[torch.Tensor]]
"""The place of a row among those measured, and its states: of each captured layer (length, H), then the last."""


class Variant(NamedTuple):
    """A way of keeping states: a codec preset, what they are stored as, and the mantissa bits that bf16 keeps."""

    codec: str
    dtype: str
    mantissa_bits: int | None = None

    @classmethod
    def of(cls, schema: StoreSchema) -> Self:
        """Return the way in which a store keeps its states."""
        return cls(schema.codec, schema.state_dtype, schema.mantissa_bits)

    @property
    def values(self) -> str:
        """What the values are, in a word."""
        return self.dtype if self.mantissa_bits is None else f"{self.dtype}, {self.mantissa_bits} bit"

    def schema(self, schema: StoreSchema, chunk_tokens: int = 0) -> StoreSchema:
        """Return a schema changed to this codec, dtype and rounding.

        ``chunk_tokens`` is what the user has asked for, 0 for what goes best with both.
        """
        if self[:2] == Variant.of(schema)[:2] and not chunk_tokens:
            return schema if self == Variant.of(schema) else replace(schema, mantissa_bits=self.mantissa_bits)
        found = replace(schema, mantissa_bits=self.mantissa_bits if self.dtype == "bf16" else None)
        found = found if self.dtype == schema.state_dtype else found.stored_as(self.dtype)
        best = default_chunk_tokens(
            schema.hidden_size, found.dtype.itemsize, schema.seq_length, compressed=self.codec != "none"
        )
        return replace(found, codec=self.codec, chunk_tokens=min(chunk_tokens or best, schema.seq_length))


def variants(dtypes: Sequence[str], mantissa_bits: int | None = None) -> Iterator[Variant]:
    """Yield each codec preset whose package is there, with each of some cache dtypes, and with bf16 that is rounded."""
    ways = [(dtype, None) for dtype in dtypes]
    rounded = [] if mantissa_bits is None else [("bf16", mantissa_bits)]
    for codec in CODEC_PRESETS:
        for dtype, kept in (*ways, *rounded):
            try:
                state_chain(codec, 1 if dtype in AIMS else cache_dtype(dtype).itemsize)
            except ImportError:
                break
            yield Variant(codec, dtype, kept)


def state_row_bytes(schema: StoreSchema, states: torch.Tensor) -> int:
    """Return the bytes of all chunks of one row, (length, H) of any dtype, in one state object.

    What is stored as codes is calibrated on the row itself.
    """
    if schema.int8 is not None:
        states = quantise(states, calibrate([states], schema.hidden_size, AIMS[schema.int8]))[0]
        schema = schema.stored
    chain, step, dtype = schema.chain(LAST), schema.chunk_tokens, schema.dtype
    bits = np.empty((step, schema.hidden_size), dtype.bits)
    total = 0
    for begin in range(0, len(states), step):
        piece = states[begin : begin + step]
        bits_tensor(bits, dtype.torch_dtype)[: len(piece)].copy_(piece)
        if schema.mantissa_bits is not None:
            round_mantissa(bits[: len(piece)], schema.mantissa_bits)
        bits[len(piece) :] = dtype.fill_bits
        total += chain.encode(bits.view(dtype.stored)).nbytes
    return total


def token_row_bytes(schema: StoreSchema, row: SampleTokens) -> tuple[int, int]:
    """Return the bytes of one row's chunk of ids and of its chunk of the mask."""
    sizes = []
    for column, values in ((IDS, row.input_ids), (MASK, row.loss_mask)):
        dtype, fill = TOKEN_VALUES[column]
        padded = np.full(schema.seq_length, fill, dtype)
        padded[: len(values)] = values
        sizes.append(schema.chain(column).encode(padded).nbytes)
    return sizes[0], sizes[1]


def table_bytes(schema: StoreSchema, table: torch.Tensor) -> float:
    """Return the bytes of a target table, (V, H) or (V,): exact for small ones, else from chunks at even distances."""
    spec, dtype = schema.weights(tuple(table.shape)), schema.dtype
    rows = spec.chunk[0]
    chunks = -(-len(table) // rows)
    chosen = np.unique(np.linspace(0, chunks - 1, min(chunks, _TABLE_CHUNKS)).round().astype(int)).tolist()
    encoded = covered = 0
    for chunk in chosen:
        piece = table[chunk * rows : (chunk + 1) * rows].detach()
        bits = np.full((rows, *piece.shape[1:]), dtype.fill_bits, dtype.bits)
        bits_tensor(bits, dtype.torch_dtype)[: len(piece)].copy_(piece)
        encoded += spec.chain.encode(bits.view(dtype.stored)).nbytes
        covered += len(piece)
    return encoded * len(table) / covered


@dataclass(slots=True)
class Measurement:
    """What ``rows`` come to in the variants of ``schemas``.

    ``sizes`` has the chunks' bytes by row and object, (rows, 2 + objects) int64 for each variant: of ids and mask,
    then of each distinct state object; ``tables`` the bytes of the target's tables. ``positions_per_second`` is what
    the target computed, padding included, None where it was not run; ``encode_seconds`` a token, of one thread.
    """

    rows: tuple[SampleTokens, ...]
    schemas: Mapping[Variant, StoreSchema]
    last_layer: int
    sizes: dict[Variant, np.ndarray] = field(default_factory=dict)
    tables: dict[Variant, float] = field(default_factory=dict)
    positions_per_second: float | None = None
    encode_seconds: dict[Variant, float] = field(default_factory=dict)

    @property
    def tokens(self) -> np.ndarray:
        """(rows,) int64: the tokens of each row."""
        return np.array([len(row) for row in self.rows], np.int64)

    def encode(self, tables: Sequence[torch.Tensor], rows: Iterable[RowStates]) -> None:
        """Encode the target's tables, each of which is stored once, and then the states of rows as they come."""
        # the codecs are never run in the main thread, where blosc takes threads of its own
        with (
            ThreadPoolExecutor(min(8, os.cpu_count() or 1), "encode") as pool,
            start_progress("measure", int(self.tokens.sum()), "tokens") as progress,
        ):
            for variant, schema in self.schemas.items():
                self.tables[variant] = sum(pool.map(partial(table_bytes, schema), tables))
                objects = len(distinct_objects(schema, self.last_layer))
                self.sizes[variant] = np.zeros((len(self.rows), 2 + objects), np.int64)
                self.sizes[variant][:, :2] = list(pool.map(partial(token_row_bytes, schema), self.rows))
                self.encode_seconds[variant] = 0.0
            for place, states_of_row in rows:
                self._encode_row(pool, place, states_of_row)
                progress.advance(len(self.rows[place]))

    def _encode_row(self, pool: Executor, place: int, states: list[torch.Tensor]) -> None:
        tasks = []
        for variant, schema in self.schemas.items():
            for number, item in enumerate(distinct_objects(schema, self.last_layer), 2):
                piece = states[-1] if item.column == LAST else states[item.slot]
                tasks.append((variant, number, pool.submit(_timed_row_bytes, schema, piece)))
        for variant, number, task in tasks:
            self.sizes[variant][place, number], seconds = task.result()
            self.encode_seconds[variant] += seconds / max(1, int(self.tokens.sum()))


def _timed_row_bytes(schema: StoreSchema, states: torch.Tensor) -> tuple[int, float]:
    started = time.perf_counter()
    return state_row_bytes(schema, states), time.perf_counter() - started


def measure_store(cache: Cache, layers: Sequence[int], measurement: Measurement) -> None:
    """Read the states of the measurement's rows from the store that has them, and encode them; and its tables.

    ``layers`` are the ids that an estimate is made for, in slot order; all slots where the store names none.
    """
    tables: list[torch.Tensor] = []
    if cache.record.weights:  # a store may have states and no tables: they would come first
        weights = cache.weights()
        tied = shares_tables(cache.record)
        tables = [weights.embed, *([] if tied else [weights.head]), *([] if weights.bias is None else [weights.bias])]

    def stored() -> Iterator[RowStates]:
        for place, row in enumerate(measurement.rows):
            span, columns = slice(0, len(row)), (LAYERS, LAST)
            batch = cache.read([row.number], columns=columns, layers=layers or None, positions=span, layout="stacked")
            yield place, [*batch[LAYERS][0], batch[LAST][0]]

    measurement.encode(tables, stored())


def measure_target(job: Job, measurement: Measurement) -> str:
    """Run the rows of a measurement through the target in the job's batches, and encode their states and its tables.

    Returns the kind of device that it ran on. Raises what loading a target raises, ValueError under torchrun, and
    StoppedError when the process is told to end.
    """
    with join_world() as world:
        if world.size > 1:
            raise ValueError("an estimate runs the target in one process: start it without torchrun")
        target = JobTarget(job.config, world, plan_target(job.config, 1, job.target), job.target.num_layers)
        with target.groups_open():
            tables = target.loaded.weights()
            if tables is None:
                raise RuntimeError("one process was given no vocabulary tables")
            head = [] if tables.facts["tied"] else [tables.head]
            bias = [] if tables.head_bias is None else [tables.head_bias]
            capture = target.loaded.capture(job.new_record.schema.layer_ids)
            states = _run(job, measurement, capture, target.input_device, world.watch.check)
            measurement.encode([tables.embedding, *head, *bias], states)
        return target.device.type


def _run(
    job: Job, measurement: Measurement, capture: StageCapture, device: torch.device, check: Callable[[], None]
) -> Iterator[RowStates]:
    """Yield the states of every row, on the CPU as the compute dtype has them; in the end, note how fast it was.

    The first forward warms up: its time counts where it is the only one.
    """
    tokens = TokenRows([row.input_ids for row in measurement.rows], [row.loss_mask for row in measurement.rows])
    pad, vocab_size = (cast(int, job.manifest[name]) for name in ("pad_token_id", "target_vocab_size"))
    positions, seconds = 0, 0.0
    for number, batch in enumerate(batches_of(tokens.lengths, job.config.batch_limit)):
        check()
        ids, attention = padded_batch(tokens, batch, pad, vocab_size)
        started = time.perf_counter()
        found = capture(ids.to(device), attention.to(device))
        if found.last is None:
            raise RuntimeError("one process was given no last hidden states")
        states = [layer.cpu() for layer in (*found.layers, found.last)]
        spent = time.perf_counter() - started
        positions, seconds = (ids.numel(), spent) if number < 2 else (positions + ids.numel(), seconds + spent)
        for position, row in enumerate(batch):
            yield row, [layer[position, : len(measurement.rows[row])] for layer in states]
    measurement.positions_per_second = positions / seconds
