"""From what some rows came to, or a table of ratios, to a whole store: bytes by column, with their range, and time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from dspark_store.format.codecs import CRC_BYTES
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import IDS, LAST, MASK, StoreSchema
from dspark_store.format.sizes import distinct_objects, weight_bytes
from dspark_store.inspection.estimate.corpus import Corpus
from dspark_store.inspection.estimate.measurement import Measurement, Variant
from dspark_store.precompute.estimate import COMPRESSION
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
    def within(cls, expected: float, error: float) -> Bytes:
        """Return a number with a standard error: the range is three of them to each side."""
        return cls(expected, max(0.0, expected - _STANDARD_ERRORS * error), expected + _STANDARD_ERRORS * error)

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


@dataclass(frozen=True, slots=True)
class StoreEstimate:
    """A whole store in one codec and dtype: ``total`` is the objects of its columns, and the target's tables.

    Metadata, index, ledger and the objects' trailers are not counted: they are a few KB per shard.
    """

    variant: Variant
    schema: StoreSchema
    parts: tuple[PartEstimate, ...]
    states: Bytes
    total: Bytes


def estimate_store(
    record: StoreRecord, schema: StoreSchema, corpus: Corpus, measurement: Measurement | None
) -> StoreEstimate:
    """Estimate the store of all samples of a corpus in the codec and dtype of ``schema``.

    Without a measurement, ratios come from the table of `precompute.estimate`.
    """
    variant = Variant.of(schema)
    record = replace(record, schema=schema)
    own = measurement if measurement is not None and variant in measurement.states else None
    states, states_sum = _state_parts(record, corpus, variant, own)
    tokens = _token_parts(schema, corpus, own)
    tables = _tables(record, variant, own)
    total = states_sum
    for part in (*tokens, tables):
        total += part.stored
    return StoreEstimate(variant, schema, (*tokens, *states, tables), states_sum, total)


def _state_parts(
    record: StoreRecord, corpus: Corpus, variant: Variant, measurement: Measurement | None
) -> tuple[list[PartEstimate], Bytes]:
    """Return the parts of the state columns and their sum, whose range is narrower than the sum of theirs."""
    schema = record.schema
    objects = distinct_objects(schema, record.last_layer)
    token_bytes = schema.hidden_size * schema.dtype.itemsize
    before = corpus.tokens * token_bytes
    chunks = int(np.sum(-(-corpus.lengths // schema.chunk_tokens)))
    shared = record.last_layer if record.last_layer in schema.layer_ids else None
    ids = [shared if item.column == LAST else item.layer_id for item in objects]
    if schema.codec == "none":
        each = Bytes.exact(chunks * (schema.chunk_tokens * token_bytes + CRC_BYTES))
        stored, total = [each] * len(objects), Bytes.exact(each.expected * len(objects))
    elif measurement is None:
        low, high = COMPRESSION[variant]
        each = Bytes(2 * before / (low + high), before / high, before / low)
        stored = [each] * len(objects)
        total = Bytes(*(len(objects) * value for value in (each.expected, each.least, each.most)))
    else:
        sizes = measurement.states[variant]
        stored = [projected(sizes[:, number], measurement.tokens, corpus) for number in range(len(objects))]
        total = projected(sizes.sum(axis=1), measurement.tokens, corpus)
    parts = [
        PartEstimate(item.column, layer, before, size) for item, layer, size in zip(objects, ids, stored, strict=True)
    ]
    return parts, total


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
    return Bytes.within(expected, whole * math.sqrt((1 - rows / whole) * variance / rows))


def _token_parts(schema: StoreSchema, corpus: Corpus, measurement: Measurement | None) -> list[PartEstimate]:
    plain = {IDS: 4 * schema.seq_length + CRC_BYTES, MASK: schema.seq_length + CRC_BYTES}
    parts = []
    for column, itemsize in ((IDS, 4), (MASK, 1)):
        if schema.codec == "none":
            stored = Bytes.exact(len(corpus) * plain[column])
        elif measurement is None:
            most = corpus.tokens * itemsize
            stored = Bytes(most / 2, 0.0, most)
        else:
            sizes = (measurement.ids if column == IDS else measurement.masks)[schema.codec]
            stored = projected(sizes, measurement.tokens, corpus)
        parts.append(PartEstimate(column, None, corpus.tokens * itemsize, stored))
    return parts


def _tables(record: StoreRecord, variant: Variant, measurement: Measurement | None) -> PartEstimate:
    before = weight_bytes(record)
    if measurement is not None and variant in measurement.tables:
        stored = measurement.tables[variant]
        return PartEstimate(TABLES, None, before if stored else 0, Bytes.exact(stored))
    low, high = COMPRESSION.get(variant, (1.0, 1.0))
    return PartEstimate(TABLES, None, before, Bytes(2 * before / (low + high), before / high, before / low))


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds to come: the target's forwards, and the encoding beside them, None where its speed is not known."""

    forward: float
    encode: float | None

    @property
    def seconds(self) -> float:
        """The longer of the two, which run side by side."""
        return max(self.forward, self.encode or 0.0)


def estimate_duration(
    corpus: Corpus,
    grid_rows: int,
    limit: BatchLimit,
    *,
    tokens_per_second: float | None = None,
    positions_per_second: float | None = None,
    encode_seconds: float | None = None,
    threads: int = 1,
) -> Duration | None:
    """Return how long the capture of a corpus takes, None when no rate is known.

    The rate that a user gives, in valid tokens, is taken at its word and includes all. A measured one is in positions,
    those of the padding included, and all batches of all shards, of ``grid_rows`` samples each, are known.
    ``encode_seconds`` is what one thread takes for a token.
    """
    if tokens_per_second is not None:
        return Duration(corpus.tokens / tokens_per_second, None)
    if positions_per_second is None:
        return None
    lengths = corpus.lengths.tolist()
    positions = sum(
        forward_cost(lengths[first : first + grid_rows], limit) for first in range(0, len(lengths), grid_rows)
    )
    encode = None if encode_seconds is None else encode_seconds * corpus.tokens / threads
    return Duration(positions / positions_per_second, encode)
