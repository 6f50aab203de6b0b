"""Sizes and times to come, from the lengths of the samples alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dspark_store.format.schema import StoreSchema
from dspark_store.precompute.progress import size_text, time_text

COMPRESSION: dict[tuple[str, int], tuple[float, float]] = {
    ("none", 2): (1.0, 1.0),
    ("none", 4): (1.0, 1.0),
    ("fast", 2): (1.10, 1.22),
    ("fast", 4): (1.05, 1.15),
    ("default", 2): (1.25, 1.51),
    ("default", 4): (1.10, 1.25),
    ("dense", 2): (1.30, 1.55),
    ("dense", 4): (1.12, 1.30),
}
"""Lowest and highest ratio seen, by codec and item size in bytes; benchmarks/writers.py measures them."""


@dataclass(frozen=True, slots=True)
class Volume:
    """What a set of samples amounts to. ``tokens`` valid positions, ``supervised`` of them under the loss."""

    samples: int
    tokens: int
    supervised: int
    unsupervised_samples: int

    @classmethod
    def of(cls, lengths: Sequence[int], supervised: Sequence[int]) -> Volume:
        """Count the lengths and supervised tokens of some samples."""
        return cls(len(lengths), sum(lengths), sum(supervised), sum(1 for count in supervised if count == 0))


def distinct_states(schema: StoreSchema, last_layer: int) -> int:
    """Return how many state vectors a token stores: the last layer's feature is the last hidden state itself."""
    return schema.num_layers + 1 - (last_layer in schema.layer_ids)


def ragged_bytes(schema: StoreSchema, last_layer: int, tokens: int) -> int:
    """Return the bytes of the states of ``tokens`` positions before compression, nothing padded or stored twice."""
    return tokens * distinct_states(schema, last_layer) * schema.hidden_size * schema.dtype.itemsize


def ragged_rows_bytes(schema: StoreSchema, tokens: int) -> int:
    """Return the bytes of the same tokens as rivals keep ragged rows: all K + 1 state vectors, ids and mask."""
    return tokens * ((schema.num_layers + 1) * schema.hidden_size * schema.dtype.itemsize + 5)


def padded_bytes(schema: StoreSchema, samples: int) -> int:
    """Return the bytes of the samples as padded safetensors keep them: K + 1 vectors a position, ids and mask int64."""
    position = (schema.num_layers + 1) * schema.hidden_size * schema.dtype.itemsize + 16
    return samples * schema.seq_length * position


def stored_range(schema: StoreSchema, raw: int) -> tuple[float, float]:
    """Return the least and the most bytes that ``raw`` bytes of states are expected to take after compression."""
    low, high = COMPRESSION[schema.codec, schema.dtype.itemsize]
    return raw / high, raw / low


def refuse_full_disk(raw: int, schema: StoreSchema, free: int) -> None:
    """Raise ValueError when what is still to be written cannot fit into ``free`` bytes."""
    _, most = stored_range(schema, raw)
    if most > free:
        raise ValueError(
            f"no space: up to {size_text(most)} are still to be written ({size_text(raw)} before compression), "
            f"{size_text(free)} are free; free some, or capture fewer layers or samples"
        )


def estimate_lines(
    schema: StoreSchema, last_layer: int, volume: Volume, free: int, rate: float | None
) -> Iterable[str]:
    """Yield the lines that ``--estimate`` prints."""
    raw = ragged_bytes(schema, last_layer, volume.tokens)
    least, most = stored_range(schema, raw)
    mean = volume.tokens / volume.samples
    vectors = distinct_states(schema, last_layer)
    unsupervised = f"{volume.unsupervised_samples:,} unsupervised"
    yield f"samples            {volume.samples:,} (mean {mean:.0f} tokens, {unsupervised})"
    yield f"tokens             {volume.tokens:,} ({volume.supervised:,} supervised)"
    yield f"states             {raw:,} bytes = {size_text(raw)} before compression ({vectors} vectors a token)"
    yield f"stored             {size_text(least)} to {size_text(most)} expected with codec {schema.codec!r}"
    yield f"padded safetensors {size_text(padded_bytes(schema, volume.samples))}"
    yield f"ragged rows        {size_text(ragged_rows_bytes(schema, volume.tokens))}"
    yield f"disk free          {size_text(free)}"
    if rate is None:
        yield "time               unknown: give --tokens-per-second, or run once (a finished run records its rate)"
    else:
        yield f"time               {time_text(volume.tokens / rate)} at {rate:,.0f} tokens/s"
