"""The bytes and the rate to expect of a capture, from the lengths of the samples and a table of ratios."""

from __future__ import annotations

from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import StoreSchema
from dspark_store.format.sizes import Volume, ragged_bytes
from dspark_store.text import size_text

COMPRESSION: dict[tuple[str, str], tuple[float, float]] = {
    ("fast", "bf16"): (1.13, 1.22),
    ("fast", "fp16"): (1.00, 1.03),
    ("fast", "fp32"): (1.06, 1.10),
    ("default", "bf16"): (1.35, 1.50),
    ("default", "fp16"): (1.11, 1.17),
    ("default", "fp32"): (1.15, 1.20),
    ("dense", "bf16"): (1.42, 1.53),
    ("dense", "fp16"): (1.13, 1.19),
    ("dense", "fp32"): (1.17, 1.22),
    ("fast", "int8"): (1.9, 2.2),
    ("fast", "int8-small"): (1.95, 2.4),
    ("default", "int8"): (2.9, 3.5),
    ("default", "int8-small"): (3.5, 4.7),
    ("dense", "int8"): (2.9, 3.5),
    ("dense", "int8-small"): (3.5, 4.7),
}
"""Lowest and highest ratio to expect, by codec and what states are stored as, of their bytes in the cache dtype.

``python -m benchmarks.ratios`` measures them, as bytes per value; these are SmolLM2-135M's, a little wider than its
layers lie apart. Codec ``none`` is not among them: its size is known.
"""


def expected_ratio(schema: StoreSchema) -> tuple[float, float]:
    """Return the lowest and the highest ratio to expect of a schema's states; its codec is not ``none``.

    Each mantissa bit that is rounded away takes a bit less, within 4 %, with every codec.
    """
    low, high = COMPRESSION[schema.codec, schema.state_dtype]
    if schema.mantissa_bits is None:
        return low, high
    gone, bits = 7 - schema.mantissa_bits, 8 * schema.dtype.itemsize
    return 0.96 * bits / (bits / low - gone), 1.04 * bits / (bits / high - gone)


def stored_range(schema: StoreSchema, last_layer: int, volume: Volume) -> tuple[float, float]:
    """Return the least and the most bytes that the states of a volume are expected to take on disk.

    Without compression the rest of each last chunk is stored too; with it, that rest takes next to nothing.
    """
    if schema.codec == "none":
        whole = ragged_bytes(schema.stored, last_layer, volume.chunk_tokens)
        return whole, whole
    raw = ragged_bytes(schema, last_layer, volume.tokens)
    low, high = expected_ratio(schema)
    return raw / high, raw / low


def recorded_rate(record: StoreRecord | None) -> float | None:
    """Return the tokens a second of the last job that came to a store's states, None when no job has told."""
    rates = [producer.get("tokens_per_second") for producer in record.producers] if record else []
    known = [float(rate) for rate in rates if isinstance(rate, int | float) and rate > 0]
    return known[-1] if known else None


def refuse_full_disk(schema: StoreSchema, last_layer: int, volume: Volume, free: int, tables: int = 0) -> None:
    """Raise ValueError when a volume and ``tables`` bytes of embedding and head cannot fit into ``free`` bytes."""
    _, most = stored_range(schema, last_layer, volume)
    if most + tables > free:
        raw = ragged_bytes(schema, last_layer, volume.tokens)
        beside = f" and {size_text(tables)} of embedding and head" if tables else ""
        raise ValueError(
            f"no space: up to {size_text(most)} of states ({size_text(raw)} before compression){beside} are still to "
            f"be written, {size_text(free)} are free; free some, or capture fewer layers or samples"
        )
