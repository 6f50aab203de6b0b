"""What samples amount to, before compression: here, in padded safetensors and in ragged rows. Pure arithmetic.

Every ratio that is printed has one denominator, the ragged bf16 rows of K + 1 vectors: see `ragged_rows_bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import StateObject, StoreSchema


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


def distinct_objects(schema: StoreSchema, last_layer: int) -> tuple[StateObject, ...]:
    """Return a shard's state objects without the last layer's: its feature is the last hidden state itself."""
    return tuple(item for item in schema.state_objects if item.layer_id != last_layer)


def distinct_states(schema: StoreSchema, last_layer: int) -> int:
    """Return how many state vectors a token stores."""
    return len(distinct_objects(schema, last_layer))


def ragged_bytes(schema: StoreSchema, last_layer: int, tokens: int) -> int:
    """Return the bytes of the states of ``tokens`` positions before compression, nothing padded or stored twice."""
    return tokens * distinct_states(schema, last_layer) * schema.hidden_size * schema.dtype.itemsize


def ragged_once_bytes(schema: StoreSchema, last_layer: int, tokens: int) -> int:
    """Return the bytes of the same tokens as ragged rows that keep the last state once, ids and mask included."""
    return ragged_bytes(schema, last_layer, tokens) + tokens * 5


def ragged_rows_bytes(schema: StoreSchema, tokens: int) -> int:
    """Return the bytes of the same tokens as rivals keep ragged rows: all K + 1 vectors in bf16, ids and mask."""
    return tokens * ((schema.num_layers + 1) * schema.hidden_size * 2 + 5)


def of_ragged_rows(schema: StoreSchema, tokens: int, count: float) -> float | None:
    """Return what ``count`` bytes are of the ragged bf16 rows of ``tokens`` positions; None where those are none."""
    return count / ragged_rows_bytes(schema, tokens) if tokens else None


def ragged_rows_name(vectors: int) -> str:
    """Return what every ratio is of, for ``vectors`` = K + 1."""
    return f"ragged bf16 rows of {vectors} vectors"


def ratio_text(ratio: float | None, vectors: int) -> str:
    """Return a ratio of `of_ragged_rows` with its denominator, of ``vectors`` = K + 1 vectors."""
    return f"{0.0 if ratio is None else ratio:.3f} of {ragged_rows_name(vectors)}"


def of_rows_text(schema: StoreSchema, tokens: int, count: float) -> str:
    """Return `of_ragged_rows` with its denominator."""
    return ratio_text(of_ragged_rows(schema, tokens, count), schema.num_layers + 1)


def padded_bytes(schema: StoreSchema, samples: int) -> int:
    """Return the bytes of the samples as padded safetensors keep them: K + 1 vectors a position, ids and mask int64."""
    position = (schema.num_layers + 1) * schema.hidden_size * schema.dtype.itemsize + 16
    return samples * schema.seq_length * position


def weight_bytes(record: StoreRecord) -> int:
    """Return the bytes of the target's embedding and head before compression, a tied head counted once."""
    vocabulary = record.manifest["target_vocab_size"]
    tables = 1 if record.tied else 2
    return tables * int(cast(int, vocabulary)) * record.schema.hidden_size * record.schema.dtype.itemsize
