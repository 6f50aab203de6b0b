"""The bytes of a store that are no token, state or weight: metadata, index, ledger, trailers. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dspark_store.format.codecs import CRC_BYTES
from dspark_store.format.manifest import ATTRIBUTE, StoreRecord
from dspark_store.format.metadata import COPY_KEY, record_nodes
from dspark_store.format.schema import (
    EMBED,
    HEAD,
    IDS,
    LAST,
    MASK,
    SHARD_SOURCES,
    STATE_LEDGER,
    TOKEN_LEDGER,
    ArraySpec,
    group_document,
    metadata_bytes,
)
from dspark_store.format.shard import ObjectLabel, Place, tail_bytes
from dspark_store.format.sizes import distinct_objects

_DIGEST = "0" * 32
_HEAD_FACTS = ("head_bias", "logit_scale", "final_logit_softcapping", "embedding_scale", "tied")
_PRODUCER_BYTES = 700  # an entry of `producers`; its names of hosts, devices and versions differ in length


@dataclass(frozen=True, slots=True)
class Bookkeeping:
    """What a complete store has beside its data, in bytes.

    ``metadata`` is every ``zarr.json`` and the root's copy, ``index`` and ``ledger`` are those arrays; ``token_tails``
    and ``state_tails`` the trailers and shard indexes of the columns' objects, those of an object with two places once.
    """

    metadata: int
    index: int
    ledger: int
    token_tails: int
    state_tails: int

    @property
    def total(self) -> int:
        """All of these bytes."""
        return self.metadata + self.index + self.ledger + self.token_tails + self.state_tails


def bookkeeping(record: StoreRecord) -> Bookkeeping:
    """Count it for the N samples of ``record``, which may be of any phase.

    Exact but for the metadata, which tells who captured, and for a few bytes where numbers have fewer digits.
    """
    record = _completed(record)
    schema = record.schema
    shards = schema.tokens.num_shards
    ledgers = {path: _array_bytes(spec) for path, spec in schema.ledgers().items()}
    rows = shards * CRC_BYTES  # the ledgers have an object a shard, each with a checksum
    sources = 0
    if schema.sources:
        sources = 2 * schema.shard_size + CRC_BYTES + _tail(record, 1, [Place(SHARD_SOURCES, 0, None, shards)])
    nodes = sum(len(metadata_bytes(document)) for document in record_nodes(record).values())
    root = group_document({ATTRIBUTE: {**record.attributes(), "root_copy": COPY_KEY, "seal": _DIGEST}})
    copies = 2  # the root's own text, and the copy of it
    return Bookkeeping(
        metadata=nodes + copies * (len(metadata_bytes(root)) + _PRODUCER_BYTES),
        index=sum(CRC_BYTES + _array_bytes(spec) for spec in {**schema.token_index(), **schema.final_index()}.values()),
        ledger=ledgers[TOKEN_LEDGER] + ledgers[STATE_LEDGER] + 2 * rows + shards * sources,
        token_tails=shards * sum(_tail(record, schema.tokens.slots, [Place(c, 0, None, shards)]) for c in (IDS, MASK)),
        state_tails=shards * sum(_tail(record, schema.states.slots, places) for places in _state_places(record)),
    )


def table_spec(record: StoreRecord) -> ArraySpec:
    """Return the array of the target's embedding."""
    vocabulary = int(record.manifest["target_vocab_size"])  # type: ignore[arg-type] # a whole number in JSON
    return record.schema.weights((vocabulary, record.schema.hidden_size))


def _completed(record: StoreRecord) -> StoreRecord:
    """Return the record as it will be when the store is complete, as far as that is known before."""
    shape = list(table_spec(record).shape)
    record = replace(record, phase="complete", weights=record.weights or {EMBED: shape, HEAD: shape})
    record = replace(record, head=record.head or dict.fromkeys(_HEAD_FACTS), producers=())
    paths = [*record.schema.token_index(), *record.schema.final_index(), *record.weights]
    return record.with_checksums(dict.fromkeys(paths, _DIGEST))


def _state_places(record: StoreRecord) -> Iterable[Sequence[Place]]:
    """Yield the places of each distinct object of a shard."""
    schema, shards = record.schema, record.schema.tokens.num_shards
    shared = [item.place(shards) for item in schema.state_objects if item.layer_id == record.last_layer]
    for item in distinct_objects(schema, record.last_layer):
        yield [item.place(shards), *(shared if item.column == LAST else ())]


def _tail(record: StoreRecord, slots: int, places: Sequence[Place]) -> int:
    return tail_bytes(ObjectLabel(record.store_id, tuple(places), record.schema.shard_size, _DIGEST), slots)


def _array_bytes(spec: ArraySpec) -> int:
    return math.prod(spec.shape) * np.dtype(spec.data_type).itemsize
