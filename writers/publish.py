"""The two steps that make a phase final: settling the tokens, and completing the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dspark_store.format.arrays import array_checksum, array_keys, pack_array
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.ledger import state_ledger, token_ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.metadata import write_metadata
from dspark_store.format.objects import Expected, open_object
from dspark_store.format.schema import (
    INDEX_DIGEST,
    INDEX_LENGTH,
    INDEX_OBJECTS,
    INDEX_SOURCE,
    INDEX_STATUS,
    INDEX_SUPERVISED,
    ArraySpec,
    StoreSchema,
)
from dspark_store.format.shard import ObjectLabel, ObjectRecord
from dspark_store.format.storage import Storage
from dspark_store.format.token_shards import TokenRows, read_shard_sources, read_token_shard

STATUS_GOOD, STATUS_NONFINITE = 0, 1


def settle_tokens(storage: Storage, record: StoreRecord) -> StoreRecord:
    """End the token phase: give every array its final N, write the index of the tokens, enter the states phase.

    N follows from the committed shards, which must be 0..n without a hole, only the last one short. A crash at any
    point loses nothing: everything written here is derived from the token shards.
    """
    ledger = token_ledger(storage)
    shards = ledger.committed()
    counts = [int(ledger.row(shard)[2, 1]) for shard in shards]
    if shards != list(range(len(shards))) or any(count != record.schema.shard_size for count in counts[:-1]):
        raise DamagedStoreError(f"token shards {shards} of {storage} are not a whole sequence")
    schema = record.schema.settled(sum(counts))
    manifest = {**record.manifest, "num_samples": schema.num_samples}
    record = replace(record, schema=schema, manifest=manifest, phase="states")
    values = token_index_values(schema, [_read_summary(storage, record, shard) for shard in shards])
    record = write_index(storage, record, schema.token_index(), values)
    write_metadata(storage, record)
    return record


@dataclass(frozen=True, slots=True)
class TokenSummary:
    """What the index says of a shard's tokens: (rows,) lengths and supervised int32, (rows, 2) digests uint64.

    ``sources`` is (rows,) uint16, empty in a store of one source.
    """

    lengths: np.ndarray
    supervised: np.ndarray
    digests: np.ndarray
    sources: np.ndarray


def summarise_tokens(rows: TokenRows, sources: np.ndarray) -> TokenSummary:
    """Return what the index says of a shard with these tokens, whose rows come from ``sources``, (rows,) uint16."""
    return TokenSummary(
        np.array(rows.lengths, np.int32),
        np.array([int(mask.sum()) for mask in rows.masks], np.int32),
        np.frombuffer(b"".join(rows.digests()), "<u8").reshape(-1, 2),
        sources,
    )


def _read_summary(storage: Storage, record: StoreRecord, shard: int) -> TokenSummary:
    rows = read_token_shard(storage, record, shard)
    several = record.schema.sources
    return summarise_tokens(
        rows, read_shard_sources(storage, record, shard, rows) if several else np.empty(0, np.uint16)
    )


def token_index_values(schema: StoreSchema, shards: Sequence[TokenSummary]) -> dict[str, np.ndarray]:
    """Return the values of the token columns of the index, by path, from all shards in order."""
    values = {
        INDEX_LENGTH: np.concatenate([shard.lengths for shard in shards]),
        INDEX_SUPERVISED: np.concatenate([shard.supervised for shard in shards]),
        INDEX_DIGEST: np.concatenate([shard.digests for shard in shards]),
    }
    return {**values, INDEX_SOURCE: np.concatenate([shard.sources for shard in shards])} if schema.sources else values


def complete_store(storage: Storage, record: StoreRecord) -> StoreRecord:
    """Check every ledger row against its objects, write the final index, and seal the store complete.

    DamagedStoreError when a shard is missing or an object is not the one in the ledger.
    """
    schema = record.schema
    count = schema.tokens.num_shards
    tokens, states = token_ledger(storage), state_ledger(storage, schema)
    for name, ledger in (("token", tokens), ("state", states)):
        if ledger.committed() != list(range(count)):
            raise DamagedStoreError(f"{name} shard indices {ledger.committed()} of {storage} are not 0..{count - 1}")
    table = np.stack([np.concatenate([tokens.row(shard), states.row(shard)]) for shard in range(count)])
    status = np.full(schema.num_samples, STATUS_GOOD, np.uint8)
    widened, all_tokens = list[list[int | None]](), 0
    for shard in range(count):
        tokens_there, labels = _check_shard(storage, record, shard, table[shard])
        bad = {row for label in labels for row in label.nonfinite}
        status[[shard * schema.shard_size + row for row in bad]] = STATUS_NONFINITE
        widened.append([label.widened for label in labels])
        all_tokens += tokens_there
    values = {INDEX_STATUS: status, INDEX_OBJECTS: table}
    record = write_index(storage, record, schema.final_index(), values)
    record = replace(record, schema=_with_widened(schema, widened, all_tokens))
    record = replace(record, phase="complete", declared_complete=True)
    write_metadata(storage, record)
    return record


def _with_widened(schema: StoreSchema, shards: Sequence[Sequence[int | None]], tokens: int) -> StoreSchema:
    """Return the schema with the share of all tokens whose step was widened, by object, where every shard tells it."""
    scales = list(schema.scales)
    for place, counts in enumerate(zip(*shards, strict=True) if scales else ()):
        known = [count for count in counts if count is not None]
        if len(known) == len(counts):
            scales[place] = replace(scales[place], widened=round(sum(known) / max(1, tokens), 6))
    return replace(schema, scales=tuple(scales))


def _check_shard(storage: Storage, record: StoreRecord, shard: int, table: np.ndarray) -> tuple[int, list[ObjectLabel]]:
    """Check a shard's state objects by their tails; return its tokens, and what the tails say of the objects."""
    schema = record.schema
    rows = read_token_shard(storage, record, shard)
    digest = rows.digest
    labels: list[ObjectLabel] = []
    for item, (nbytes, row_digest) in zip(schema.state_objects, table[-len(schema.state_objects) :], strict=True):
        ledger_row = ObjectRecord(int(nbytes), int(row_digest))
        expected = Expected(record.store_id, item.place(shard), ledger_row, digest)
        stored = open_object(storage, item.key(shard), schema.states, expected)
        stored.reader.close()
        labels.append(stored.tail.label)
    return sum(rows.lengths), labels


def write_index(
    storage: Storage, record: StoreRecord, specs: Mapping[str, ArraySpec], values: Mapping[str, np.ndarray]
) -> StoreRecord:
    """Write these arrays of the index; return the record with their checksums, for the caller to write."""
    for path, spec in specs.items():
        (key,) = array_keys(path, spec)
        storage.put(key, pack_array(values[path].astype(spec.data_type, copy=False)))
    return record.with_checksums({path: array_checksum(storage, path, spec) for path, spec in specs.items()})
