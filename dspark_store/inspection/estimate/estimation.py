"""From every sample's length, and what some samples came to or a table of ratios, to a whole store: bytes and time."""

from __future__ import annotations

import math
import random
from array import array
from dataclasses import dataclass, replace

import numpy as np

from dspark_store.format.codecs import CRC_BYTES
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import IDS, LAST, LAYERS, MASK, StoreSchema
from dspark_store.format.sizes import distinct_objects, weight_bytes
from dspark_store.inspection.estimate.measurement import Measurement, Variant
from dspark_store.inspection.samples import SampleTokens, read_tokens
from dspark_store.precompute.estimate import COMPRESSION, expected_ratio
from dspark_store.precompute.tokenise import no_samples
from dspark_store.progress import start_progress
from dspark_store.readers.cache import Cache
from dspark_store.sources.source import Source
from dspark_store.target.batches import BatchLimit, forward_cost

TABLES = "target"
"""What the target's vocabulary tables are called beside the columns: the folder that they are in."""
_SEED = 0
_STANDARD_ERRORS = 3
"""Half a range. Some rows are odd: of 32 rows of real chats, two held the truth 85 times in 100, three 94 times."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """N samples: ``lengths`` (N,) int64 and, where somebody has counted them, ``supervised`` (N,) int64.

    ``rows`` are some of the samples, chosen at random and in order, the same ones every time.
    """

    lengths: np.ndarray
    supervised: np.ndarray | None
    rows: tuple[SampleTokens, ...]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Valid tokens of all samples."""
        return int(self.lengths.sum())


def count_source(source: Source, seq_length: int, rows: int, *, all_kept: bool) -> Corpus:
    """Count what a source gives, and take ``rows`` of it at random.

    A source that knows its lengths is not read through, if ``all_kept`` says that no sample of it is left out for want
    of supervision, and none of its records is cut into several samples. SourceError when it has no samples.
    """
    lengths = source.lengths() if all_kept else None
    if lengths is not None and lengths.max(initial=0) <= seq_length:
        records = np.flatnonzero(lengths)
        if not len(records):
            raise no_samples(source)
        samples = {number: source.sample(int(records[number])) for number in chosen_numbers(len(records), rows)}
        taken = (SampleTokens(number, sample.input_ids, sample.loss_mask) for number, sample in samples.items())
        return Corpus(lengths[records], None, tuple(taken))
    counts, supervised, kept, draw = array("q"), array("q"), list[SampleTokens](), random.Random(_SEED)
    with start_progress("tokenise", len(source), "rows") as progress:
        for number, sample in enumerate(source.read()):
            counts.append(len(sample.input_ids))
            supervised.append(int(sample.loss_mask.sum()))
            place = number if number < rows else draw.randrange(number + 1)  # Vitter's algorithm R
            if place < rows:
                kept[place : place + 1] = [SampleTokens(number, sample.input_ids, sample.loss_mask)]
            progress.reach(source.record_of(sample.cursor), lambda: f"{len(counts):,} samples")
        progress.reach(len(source), lambda: "")
    if not counts:
        raise no_samples(source)
    in_order = sorted(kept, key=lambda row: row.number)
    return Corpus(np.array(counts, np.int64), np.array(supervised, np.int64), tuple(in_order))


def count_store(cache: Cache, rows: int) -> Corpus:
    """Count a store's samples, and take ``rows`` of those whose states can be read, or of all where none can.

    ValueError when the store is still in its token phase.
    """
    if cache.record.phase == "tokens":
        raise ValueError(f"store at {cache.storage} is still in its token phase: its lengths are not known yet")
    grid = cache.schema.tokens
    readable = [sample for shard in cache.index.committed() for sample in grid.rows(shard)]
    samples = readable or range(len(cache))
    taken = tuple(read_tokens(cache, samples[place]) for place in chosen_numbers(len(samples), rows))
    return Corpus(cache.lengths.astype(np.int64), cache.supervised.astype(np.int64), taken)


def chosen_numbers(count: int, wanted: int) -> list[int]:
    """Return ``wanted`` of the numbers below ``count``, or all of them, in order; the same ones every time."""
    return sorted(random.Random(_SEED).sample(range(count), min(wanted, count)))


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
    vector, coded = (kind.hidden_size * kind.dtype.itemsize for kind in (schema, schema.stored))
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
            width = coded if name in (LAYERS, LAST) else nbytes
            stored = Bytes.exact(count * (positions * width + CRC_BYTES))
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
    ratios = COMPRESSION.get((variant.codec, record.schema.dtype.name), (1.0, 1.0))
    return PartEstimate(TABLES, None, before, Bytes.compressed(before, ratios))


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
