"""Sizes and times to come, from the lengths of the samples alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import StoreSchema
from dspark_store.precompute.progress import size_text, time_text

COMPRESSION: dict[tuple[str, str], tuple[float, float]] = {
    ("fast", "bf16"): (1.13, 1.22),
    ("fast", "fp16"): (1.00, 1.03),
    ("fast", "fp32"): (1.06, 1.10),
    ("default", "bf16"): (1.35, 1.50),
    ("default", "fp16"): (1.11, 1.16),
    ("default", "fp32"): (1.15, 1.20),
    ("dense", "bf16"): (1.42, 1.53),
    ("dense", "fp16"): (1.13, 1.19),
    ("dense", "fp32"): (1.17, 1.22),
}
"""Lowest and highest ratio to expect, by codec and cache dtype.

``python -m benchmarks.ratios`` measures them; these are SmolLM2-135M's, a little wider than its layers lie apart. Codec
``none`` is not among them: its size is known.
"""


@dataclass(frozen=True, slots=True)
class Volume:
    """What a set of samples amounts to.

    ``tokens`` valid positions, ``supervised`` of them under the loss; ``chunk_tokens`` positions of all their chunks,
    the rest of each last one included.
    """

    samples: int
    tokens: int
    chunk_tokens: int
    supervised: int
    unsupervised_samples: int

    @classmethod
    def of(cls, schema: StoreSchema, lengths: Sequence[int], supervised: Sequence[int]) -> Volume:
        """Count the lengths and supervised tokens of some samples of a store."""
        chunked = sum(schema.states.chunks_of(length) for length in lengths) * schema.chunk_tokens
        unsupervised = sum(1 for count in supervised if count == 0)
        return cls(len(lengths), sum(lengths), chunked, sum(supervised), unsupervised)


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


def weight_bytes(record: StoreRecord) -> int:
    """Return the bytes of the target's embedding and head before compression, a tied head counted once."""
    vocabulary = record.manifest["target_vocab_size"]
    tied = bool((record.target_config or {}).get("tie_word_embeddings", True))
    tables = 1 if tied else 2
    return tables * int(cast(int, vocabulary)) * record.schema.hidden_size * record.schema.dtype.itemsize


def stored_range(schema: StoreSchema, last_layer: int, volume: Volume) -> tuple[float, float]:
    """Return the least and the most bytes that the states of a volume are expected to take on disk.

    Without compression the rest of each last chunk is stored too; with it, that rest takes next to nothing.
    """
    if schema.codec == "none":
        whole = ragged_bytes(schema, last_layer, volume.chunk_tokens)
        return whole, whole
    raw = ragged_bytes(schema, last_layer, volume.tokens)
    low, high = COMPRESSION[schema.codec, schema.dtype.name]
    return raw / high, raw / low


def refuse_full_disk(schema: StoreSchema, last_layer: int, volume: Volume, free: int) -> None:
    """Raise ValueError when a volume that is still to be written cannot fit into ``free`` bytes."""
    _, most = stored_range(schema, last_layer, volume)
    if most > free:
        raw = ragged_bytes(schema, last_layer, volume.tokens)
        raise ValueError(
            f"no space: up to {size_text(most)} are still to be written ({size_text(raw)} before compression), "
            f"{size_text(free)} are free; free some, or capture fewer layers or samples"
        )


def estimate_lines(
    schema: StoreSchema, last_layer: int, volume: Volume, free: int, rate: float | None
) -> Iterable[str]:
    """Yield the lines that ``--estimate`` prints."""
    raw = ragged_bytes(schema, last_layer, volume.tokens)
    least, most = stored_range(schema, last_layer, volume)
    mean = volume.tokens / max(1, volume.samples)
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
