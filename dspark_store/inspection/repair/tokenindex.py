"""Putting the token columns of the index right by the tokens, and the shards' sources by the index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from dspark_store.format.arrays import array_keys, object_limit, unpack_array
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import IDS, INDEX_SOURCE, MASK
from dspark_store.format.storage import Storage
from dspark_store.format.token_shards import TokenRows, read_shard_sources, read_token_shard, sources_key
from dspark_store.inspection.repair.ledgers import checksum_holds, restore_index
from dspark_store.inspection.repair.mending import Mending
from dspark_store.writers.publish import TokenSummary, summarise_tokens, token_index_values
from dspark_store.writers.tokens import write_shard_sources


@dataclass(frozen=True, slots=True)
class ReadTokens:
    """A shard's tokens as they are stored: what the index says of them, None if they are ``damaged``, and why.

    ``digest`` is that of the shard's tokens; ``sourceless`` tells that the object with their sources is damaged.
    """

    summary: TokenSummary | None
    digest: str = ""
    damaged: str = ""
    sourceless: bool = False


def read_tokens(storage: Storage, record: StoreRecord, shard: int) -> ReadTokens:
    """Read and decode a shard's tokens and their sources."""
    try:
        rows = read_token_shard(storage, record, shard)
    except (ValueError, OSError) as error:
        return ReadTokens(None, damaged=str(error))
    sources = _read_sources(storage, record, shard, rows)
    summary = summarise_tokens(rows, np.empty(0, np.uint16) if sources is None else sources)
    return ReadTokens(summary, rows.digest, sourceless=sources is None)


def _read_sources(storage: Storage, record: StoreRecord, shard: int, rows: TokenRows) -> np.ndarray | None:
    if not record.schema.sources:
        return np.empty(0, np.uint16)
    try:
        return read_shard_sources(storage, record, shard, rows)
    except (ValueError, OSError):
        return None


def mend_token_index(mending: Mending) -> None:
    """Put the index right where all tokens are whole; note the shards whose tokens are not.

    Tokens that another tool has encoded anew have no ledger and no labels that could prove them, and prove nothing.
    """
    if mending.root.foreign & {IDS, MASK}:
        return
    shards = range(mending.schema.tokens.num_shards)
    found = mending.workers.in_order("tokens", partial(read_tokens, mending.storage, mending.record), shards)
    for shard, tokens in enumerate(found):
        if tokens.damaged:
            mending.spoil(mending.tokens, shard, tokens.damaged)
    if any(tokens.sourceless for tokens in found):
        found = _mend_sources(mending, found)
    summaries = [tokens.summary for tokens in found if tokens.summary is not None]
    if not mending.tokens:
        restore_index(mending, token_index_values(mending.schema, summaries))


def _mend_sources(mending: Mending, found: Sequence[ReadTokens]) -> list[ReadTokens]:
    """Write damaged objects of sources again from `index/source`; without it, the tokens must be made again."""
    spec = mending.schema.token_index()[INDEX_SOURCE]
    (key,) = array_keys(INDEX_SOURCE, spec)
    try:
        data = mending.storage.read(key, object_limit(spec))
        numbers = unpack_array(data, spec.data_type, spec.shape, key)
    except (OSError, DamagedStoreError):
        data, numbers = b"", np.empty(0, np.uint16)
    known = checksum_holds(mending, INDEX_SOURCE, data) and bool((numbers < len(mending.schema.sources)).all())
    mended = list(found)
    for shard, tokens in enumerate(found):
        if tokens.summary is None or not tokens.sourceless:
            continue
        rows = mending.schema.tokens.rows(shard)
        if not known:
            mending.spoil(mending.tokens, shard, f"{sources_key(shard)} and {INDEX_SOURCE} are both damaged")
            continue
        write_shard_sources(mending.storage, mending.record, shard, numbers[rows].tolist(), tokens.digest)
        mending.restored.append(sources_key(shard))
        mended[shard] = read_tokens(mending.storage, mending.record, shard)
    return mended
