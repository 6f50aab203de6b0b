"""The bytes that a copy of a store takes, from the lengths of the samples and from what the source takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import EMBED, HEAD, TOKEN_OBJECTS
from dspark_store.format.storage import LocalStorage
from dspark_store.format.volumes import Volume, distinct_states, ragged_bytes
from dspark_store.precompute.estimate import stored_range
from dspark_store.precompute.progress import size_text
from dspark_store.readers.cache import Cache

_NO_LAYER = -2  # below the embedding's
_CHUNK_BYTES = 20  # of an object's trailer and index, for every chunk that it has room for
_TOKEN_BYTES = 5  # an id and its mask


@dataclass(frozen=True, slots=True)
class CopySize:
    """Sizes of a copy, ``record``, of the store ``source``."""

    source: Cache
    record: StoreRecord

    def raw(self, shards: Sequence[int]) -> int:
        """Return the bytes of the states of some shards of the copy before compression."""
        return ragged_bytes(self.record.schema, _last_layer(self.record), sum(self._lengths(shards)))

    def coming(self, tokens: Sequence[int], states: Sequence[int]) -> int:
        """Return about the most bytes that are still to be written, for shards without tokens and without states.

        States that keep their codec take what they take in the source; with another one, only a range is known.
        """
        schema = self.record.schema
        rows, vectors = self._lengths(tokens), distinct_states(schema, _last_layer(self.record))
        token_bytes = len(rows) * schema.seq_length if schema.codec == "none" else sum(rows)
        slots = len(tokens) * 2 * schema.tokens.slots + len(states) * vectors * schema.states.slots
        tables = 0 if self.record.weights else _weight_bytes(self.source.record)
        return self._state_bytes(states) + _TOKEN_BYTES * token_bytes + _CHUNK_BYTES * slots + tables

    def _state_bytes(self, shards: Sequence[int]) -> int:
        schema, old = self.record.schema, self.source.schema
        lengths, last_layer = self._lengths(shards), _last_layer(self.record)
        if schema.codec == old.codec != "none":
            everything = max(1, ragged_bytes(old, last_layer, int(self.source.lengths.sum())))
            return _source_state_bytes(self.source) * self.raw(shards) // everything
        return round(stored_range(schema, last_layer, Volume.of(schema, lengths, lengths))[1])

    def _lengths(self, shards: Sequence[int]) -> list[int]:
        rows = [self.record.schema.tokens.rows(shard) for shard in shards]
        return [length for part in rows for length in self.source.lengths[part.start : part.stop].tolist()]


def refuse_small_disk(destination: LocalStorage, coming: int) -> None:
    """Raise ValueError when what is still to be written does not fit."""
    free = destination.free_bytes()
    if coming > free:
        raise ValueError(
            f"no space: about {size_text(coming)} are still to be written to {destination}, {size_text(free)} are "
            "free; free some, or choose another destination"
        )


def shares_tables(record: StoreRecord) -> bool:
    """Tell whether a store's head is its embedding, of which the objects are then the same."""
    return HEAD in record.weights and record.checksums.get(HEAD) == record.checksums.get(EMBED)


def _weight_bytes(record: StoreRecord) -> int:
    tables = [shape for path, shape in record.weights.items() if path != HEAD or not shares_tables(record)]
    return sum(prod(shape) for shape in tables) * record.schema.dtype.itemsize


def _source_state_bytes(source: Cache) -> int:
    first = len(TOKEN_OBJECTS)
    positions = range(first, first + len(source.schema.state_objects))
    shards = range(source.schema.tokens.num_shards)
    return sum(
        sum(item.nbytes for item in {source.index.object_record(shard, position) for position in positions})
        for shard in shards
    )


def _last_layer(record: StoreRecord) -> int:
    """Return the id of the target's last layer, or one that no layer has where the manifest does not say."""
    return record.last_layer if "num_hidden_layers" in record.manifest else _NO_LAYER
