"""Checking a whole store against its own promises, without the target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.digests import sample_digest, shard_digest
from dspark_store.format.ledger import Ledger
from dspark_store.format.objects import Expected, open_object
from dspark_store.format.schema import (
    IDS,
    LAST,
    LAYERS,
    MASK,
    STATE_LEDGER,
    TOKEN_LEDGER,
    TOKEN_OBJECTS,
    StateObject,
)
from dspark_store.readers.cache import Cache


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in a store that is not as it was written. ``samples`` are those that it hits."""

    samples: tuple[int, ...]
    message: str


def verify_store(cache: Cache, progress: Callable[[int, int], None] | None = None) -> list[Problem]:
    """Check every object of a store that is open for reading: ledger, trailers, chunks, index, weights.

    The store is opened anew, with checksums on, so that nothing which ``cache`` already holds hides damage. Of a
    growing store the committed shards are checked. ``progress`` is called with (shards done, shards). Returns the
    problems found, an empty list for a good store.
    """
    try:
        cache = Cache(cache.storage, allow_incomplete=True)
    except (ValueError, OSError) as error:
        return [Problem((), str(error))]
    problems = [*_guard((), partial(_check_index, cache)), *_guard((), partial(_check_weights, cache))]
    shards = cache.index.committed()
    for done, shard in enumerate(shards, start=1):
        problems += _check_shard(cache, shard)
        if progress is not None:
            progress(done, len(shards))
    return problems


def _guard(samples: tuple[int, ...], check: Callable[[], object]) -> list[Problem]:
    try:
        check()
    except (DamagedStoreError, OSError) as error:
        return [Problem(samples, str(error))]
    return []


def _check_index(cache: Cache) -> None:
    lengths, supervised = cache.lengths, cache.supervised
    outside = (lengths < 0) | (lengths > cache.schema.seq_length) | (supervised < 0) | (supervised > lengths)
    if outside.any():
        raise DamagedStoreError(f"index of sample {int(outside.argmax())} is out of range")
    for values in (cache.index.digest, cache.status, cache.source):
        if len(values) != len(cache):
            raise DamagedStoreError(f"an index array holds {len(values)} samples, expected {len(cache)}")


def _check_weights(cache: Cache) -> None:
    if cache.record.weights:
        cache.weights()


def _check_shard(cache: Cache, shard: int) -> list[Problem]:
    rows = cache.schema.tokens.rows(shard)
    problems = _guard(tuple(rows), partial(_check_ledger, cache, shard))
    for item in cache.schema.state_objects:
        if item.column in cache.foreign_columns:
            continue
        problems += _guard(tuple(rows), partial(_check_label, cache, item, shard))
    for sample in rows:
        problems += _guard((sample,), partial(_check_tokens, cache, sample))
        for column in (LAYERS, LAST):  # together, an object that stands at two places would be read at one of them
            problems += _guard((sample,), partial(_check_states, cache, column, sample))
    return problems


def _check_ledger(cache: Cache, shard: int) -> None:
    """Compare the ledger's own rows with the table that a complete store is read by."""
    objects = len(cache.schema.state_objects)
    for path, count, first in ((TOKEN_LEDGER, len(TOKEN_OBJECTS), 0), (STATE_LEDGER, objects, len(TOKEN_OBJECTS))):
        row = Ledger(cache.storage, path, count).row(shard)
        for position, (nbytes, digest) in enumerate(row):
            record = cache.index.object_record(shard, first + position)
            if (record.nbytes, record.digest) != (int(nbytes), int(digest)):
                raise DamagedStoreError(f"{path}, shard {shard}: the ledger row differs from index/objects")


def _check_tokens(cache: Cache, sample: int) -> None:
    length = int(cache.lengths[sample])
    batch = cache.read([sample], columns=(IDS, MASK), positions=slice(0, length))
    ids, mask = batch[IDS][0].numpy(), batch[MASK][0].numpy()
    if int(mask.sum()) != int(cache.supervised[sample]):
        raise DamagedStoreError(f"index/supervised of sample {sample} differs from its mask")
    digest = np.frombuffer(sample_digest(ids, mask), "<u8")
    if not np.array_equal(digest, cache.index.digest[sample]):
        raise DamagedStoreError(f"index/digest of sample {sample} differs from its tokens")


def _check_label(cache: Cache, item: StateObject, shard: int) -> None:
    """Check that an object was computed from the tokens that the store holds."""
    tokens = shard_digest(cache.index.digest[sample].tobytes() for sample in cache.schema.tokens.rows(shard))
    expected = Expected(cache.record.store_id, item.place(shard), tokens=tokens)
    open_object(cache.storage, item.key(shard), cache.schema.states.slots, expected).reader.close()


def _check_states(cache: Cache, column: str, sample: int) -> None:
    cache.read([sample], columns=(column,), layout="stacked")
