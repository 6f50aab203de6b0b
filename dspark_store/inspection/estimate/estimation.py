"""From what some rows came to, or a table of ratios, to a whole store: bytes by column, with their range, and time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from dspark_store.format.codecs import CRC_BYTES
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import IDS, LAST, LAYERS, MASK, StoreSchema
from dspark_store.format.sizes import distinct_objects, weight_bytes
from dspark_store.inspection.estimate.corpus import Corpus
from dspark_store.inspection.estimate.measurement import Measurement, Variant
from dspark_store.precompute.estimate import COMPRESSION, expected_ratio
from dspark_store.target.batches import BatchLimit, forward_cost

TABLES = "target"
"""What the target's vocabulary tables are called beside the columns: the folder that they are in."""
_STANDARD_ERRORS = 3
"""Half a range. Some rows are odd: of 32 rows of real chats, two held the truth 85 times in 100, three 94 times."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """A number of bytes to come, ``least`` to ``most`` around what is ``expected``; all the same where it is exact."""

    expected: float
    least: float
    most: float

    @classmethod
    def exact(cls, count: float) -> Bytes:
        """Return a number that is known."""
        return cls(count, count, count)

    @classmethod
    def compressed(cls, before: float, ratios: tuple[float, float]) -> Bytes:
        """Return what bytes become that are compressed by the lowest to the highest of two ratios."""
        low, high = ratios
        return cls(2 * before / (low + high), before / high, before / low)

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.expected + other.expected, self.least + other.least, self.most + other.most)


@dataclass(frozen=True, slots=True)
class PartEstimate:
    """One part of a store: a column, one layer of it, or the target's tables. ``before`` is without compression.

    ``layer_id`` is the layer of a state column's object; that of the last hidden states has the last layer's id where
    they are captured as its feature too.
    """

    name: str
    layer_id: int | None
    before: int
    stored: Bytes

    @property
    def label(self) -> str:
        """What people call it."""
        if self.name == LAST:
            return "last hidden states" + ("" if self.layer_id is None else f", layer {self.layer_id}")
        return {LAYERS: f"layer {self.layer_id}", TABLES: "the target's embedding and head"}.get(self.name, self.name)


@dataclass(frozen=True, slots=True)
class StoreEstimate:
    """A whole store in one codec and dtype: ids, mask and states in ``columns``, then the target's ``tables``.

    ``total`` is the sum of both. Metadata, index, ledger and the objects' trailers are not counted: they are a few KB
    per shard. The range of the sum of all ``states`` is narrower than the sum of theirs.
    """

    variant: Variant
    schema: StoreSchema
    columns: tuple[PartEstimate, ...]
    tables: PartEstimate
    states: Bytes
    total: Bytes


def estimate_store(
    record: StoreRecord, schema: StoreSchema, corpus: Corpus, measurement: Measurement | None
) -> StoreEstimate:
    """Estimate the store of all samples of a corpus in the codec and dtype of ``schema``.

    Without a measurement, ratios come from the table of `precompute.estimate`.
    """
    variant, tokens, nothing = Variant.of(schema), corpus.tokens, Bytes.exact(0)
    vector = schema.hidden_size * schema.dtype.itemsize
    chunks = int(np.sum(-(-corpus.lengths // schema.chunk_tokens)))
    shared = record.last_layer if record.last_layer in schema.layer_ids else None
    objects = distinct_objects(schema, record.last_layer)
    # of each part: name, layer, bytes per position, chunks and positions per chunk
    kinds: list[tuple[str, int | None, int, int, int]] = [
        (IDS, None, 4, len(corpus), schema.seq_length),
        (MASK, None, 1, len(corpus), schema.seq_length),
    ]
    layers = [(item.column, shared if item.column == LAST else item.layer_id) for item in objects]
    kinds += [(column, layer, vector, chunks, schema.chunk_tokens) for column, layer in layers]
    columns = []
    for number, (name, layer, nbytes, count, positions) in enumerate(kinds):
        before = tokens * nbytes
        if schema.codec == "none":
            stored = Bytes.exact(count * (positions * nbytes + CRC_BYTES))
        elif measurement is not None:
            stored = projected(measurement.sizes[variant][:, number], measurement.tokens, corpus)
        else:
            of_tokens = Bytes(before / 2, 0.0, before)
            stored = of_tokens if name in (IDS, MASK) else Bytes.compressed(before, expected_ratio(schema))
        columns.append(PartEstimate(name, layer, before, stored))
    states = sum((part.stored for part in columns[2:]), nothing)
    if schema.codec != "none" and measurement is not None:
        states = projected(measurement.sizes[variant][:, 2:].sum(axis=1), measurement.tokens, corpus)
    tables = _tables(replace(record, schema=schema), variant, measurement)
    total = sum((part.stored for part in (*columns[:2], tables)), states)
    return StoreEstimate(variant, schema, tuple(columns), tables, states, total)


def _tables(record: StoreRecord, variant: Variant, measurement: Measurement | None) -> PartEstimate:
    before = weight_bytes(record)
    if measurement is not None:
        stored = measurement.tables[variant]
        return PartEstimate(TABLES, None, before if stored else 0, Bytes.exact(stored))
    return PartEstimate(TABLES, None, before, Bytes.compressed(before, COMPRESSION.get(variant[:2], (1.0, 1.0))))


def projected(sizes: np.ndarray, tokens: np.ndarray, corpus: Corpus) -> Bytes:
    """Project the bytes of some rows, chosen at random, to all: a ratio estimate, by tokens, with its standard error.

    ``sizes`` and ``tokens`` are (rows,). Exact when all rows were measured.
    """
    rows, whole = len(tokens), len(corpus)
    if not tokens.sum():
        return Bytes.exact(0)
    ratio = float(sizes.sum() / tokens.sum())
    expected = ratio * corpus.tokens
    if rows == whole:
        return Bytes.exact(expected)
    if rows < 2:
        return Bytes(expected, 0.0, math.inf)
    variance = float(((sizes - ratio * tokens) ** 2).sum()) / (rows - 1)
    error = _STANDARD_ERRORS * whole * math.sqrt((1 - rows / whole) * variance / rows)
    return Bytes(expected, max(0.0, expected - error), expected + error)


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds to come: the target's forwards, and the encoding beside them, None where its speed is not known."""

    forward: float
    encode: float | None

    @property
    def seconds(self) -> float:
        """The longer of the two, which run side by side."""
        return max(self.forward, self.encode or 0.0)


def measured_duration(
    corpus: Corpus, grid_rows: int, limit: BatchLimit, positions_per_second: float, encode_seconds: float
) -> Duration:
    """Return how long the capture of a corpus takes by a measured rate.

    Positions are those of the padding too: all batches of all shards, of ``grid_rows`` samples each, are known.
    ``encode_seconds`` is what all threads together take for a token.
    """
    lengths = corpus.lengths.tolist()
    shards = (lengths[first : first + grid_rows] for first in range(0, len(lengths), grid_rows))
    positions = sum(forward_cost(shard, limit) for shard in shards)
    return Duration(positions / positions_per_second, encode_seconds * corpus.tokens)
