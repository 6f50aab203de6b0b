"""Writing a store from any engine: tokens once, then states sample by sample, from any thread and in any order.

One process makes the store with `create_store`, and holds its lock; others open it with `join_store` and the key that
the first one gives. Which samples a process captures follows from its number alone. Whatever does not come in, the next
`create_store` with the same arguments finds missing.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from os import PathLike, fspath
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from dspark_store.format.dtypes import CACHE_DTYPES
from dspark_store.format.jsonvalue import JsonValue, json_digest
from dspark_store.format.ledger import state_ledger
from dspark_store.format.manifest import StoreRecord, identity_digest
from dspark_store.format.metadata import read_record, write_metadata
from dspark_store.format.schema import MOST_IDS
from dspark_store.format.storage import LocalStorage
from dspark_store.format.token_shards import sample_digest
from dspark_store.precompute.capture import check_equality_class, missing_shards, with_producer
from dspark_store.precompute.job import existing_record, new_schema, open_or_create, peer_identity
from dspark_store.precompute.pushed import StoreWriter
from dspark_store.precompute.settings import PrecomputeConfig
from dspark_store.precompute.tokenise import tokenise
from dspark_store.precompute.undo import clean, new_folders_undone, new_store_undone
from dspark_store.sources.source import Sample, Source, SourceError
from dspark_store.target.layers import validate_target_layer_ids
from dspark_store.writers.lock import StoreLock, check_lock

type Tokens = Iterable[Sequence[int] | np.ndarray | tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]]

_OFFSETS = {"vllm": -1, "speculators": -1, "transformers": -1, "sglang": 0}
"""What to add to an engine's layer ids to have ours."""


def convert_layer_ids(ids: Sequence[int], convention: str) -> list[int]:
    """Return the layer ids of an engine as this store counts them: -1 the embedding, i the output of decoder layer i.

    Args:
        ids: as the engine is given them, strictly increasing: engines sort and deduplicate others without a word, and
            their states then lie in other slots than was asked for.
        convention: vllm, speculators and transformers count the layers that were applied, so that k is the output of
            layer k - 1; sglang counts as this store does. The id past the last layer is, in vllm and speculators, the
            state *before* the final norm, which no layer of a store is.

    Raises:
        ValueError: the convention is not known, or the ids are not of it.

    """
    if convention not in _OFFSETS:
        raise ValueError(f"convention {convention!r} is not known; expected one of {', '.join(sorted(_OFFSETS))}")
    offset = _OFFSETS[convention]
    return validate_target_layer_ids([layer + offset for layer in ids], MOST_IDS, explicit=False)


class GivenTokens(Source):
    """Tokens that the caller holds: ids (length,), or pairs of ids and a loss mask of 0 and 1, (length,) both."""

    def __init__(self, rows: Tokens, seq_length: int, vocab_size: int) -> None:
        self._rows, self._seq_length, self._vocab_size = rows, seq_length, vocab_size
        self._count = len(rows) if isinstance(rows, Sequence) else 0

    def identity(self) -> dict[str, JsonValue]:
        """Return a digest over a sequence of tokens; what an iterator will give is not known."""
        if not isinstance(self._rows, Sequence):
            return {"type": "given"}
        digests = [sample_digest(sample.input_ids, sample.loss_mask).hex() for sample in self.read()]
        return {"type": "given", "tokens": json_digest(cast("list[JsonValue]", digests))}

    def __len__(self) -> int:
        return self._count

    def record_of(self, cursor: int) -> int:
        """Return the samples before a cursor."""
        return cursor

    def sample(self, record: int) -> Sample:
        """Return one sample; IndexError when there is no such."""
        for sample in self.read(record):
            return sample
        raise IndexError(f"there is no sample {record}")

    def read(self, cursor: int = 0) -> Iterator[Sample]:
        """Yield the samples from the cursor on; SourceError naming one that is no row of tokens."""
        for number, row in enumerate(islice(iter(self._rows), cursor, None), cursor):
            pair = row if isinstance(row, tuple) else (row, np.ones(len(row), np.uint8))
            ids, mask = (np.asarray(each) for each in pair)
            if ids.ndim != 1 or ids.dtype.kind not in "iu" or not 1 <= len(ids) <= self._seq_length:
                raise SourceError(
                    f"sample {number} has ids of shape {ids.shape} and type {ids.dtype}: expected 1 to "
                    f"{self._seq_length} whole numbers"
                )
            if int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size:
                raise SourceError(f"sample {number} has ids outside of 0 to {self._vocab_size - 1}")
            if mask.shape != ids.shape or not np.isin(mask, (0, 1)).all():
                raise SourceError(f"the loss mask of sample {number} must be {len(ids)} values of 0 and 1")
            yield Sample(ids.astype(np.int32), mask.astype(np.uint8), number + 1)


def create_store(
    path: str | PathLike[str],
    tokens: Source | Tokens,
    *,
    target_config: Mapping[str, JsonValue],
    layer_ids: Sequence[int],
    seq_length: int,
    equality_class: str,
    target_model: str = "",
    identity: Mapping[str, JsonValue] | None = None,
    producer: Mapping[str, JsonValue] | None = None,
    pad_token_id: int = 0,
    dtype: str = "bf16",
    shard_size: int = 256,
    codec: str = "default",
    mix_equality_classes: bool = False,
    buffer_bytes: int = 512 * 1024 * 1024,
    open_shards: int = 16,
) -> StoreWriter:
    """Make a store from tokens, or go on with one that was made from the same; lock it, and write its tokens.

    Args:
        path: a new or empty folder, or such a store.
        tokens: a sequence or an iterable of samples, each its ids, or a tuple of ids and loss mask; or a source. An
            iterator that is to be gone on with must give the same again.
        target_config: the target's text configuration: `hidden_size`, `vocab_size`, `num_hidden_layers` at least, best
            all of its config.json.
        layer_ids: of the layers to store, strictly increasing; see `convert_layer_ids`.
        seq_length: S, the most tokens of a sample.
        equality_class: names what decides the last bits of a state, such as "vllm 0.32.0 cuda bf16": two classes are
            not mixed in a store unless `mix_equality_classes` says so.
        target_model: the target's name, which is only written down.
        identity: what else decides the states, such as the digest of the target's weights under `target_weights`; a
            store with another is another.
        producer: what is written down of who captures, such as the engine's version.
        pad_token_id: what readers that pad put past a sample's end.
        dtype, shard_size, codec: as in a precompute.
        buffer_bytes: of states that may wait to be encoded; `StoreWriter.add` waits beyond it.
        open_shards: shards that may have some of their samples and not all, each with a file per layer.

    Raises:
        ValueError: the store was made from something else, or an argument cannot be.
        SourceError: a sample is no row of tokens.
        BlockingIOError: another process writes to the store.

    """
    storage = LocalStorage(path)
    existing_record(storage, resume=True)
    absent = [name for name in ("hidden_size", "vocab_size", "num_hidden_layers") if name not in target_config]
    if absent:
        raise ValueError(f"target_config lacks {', '.join(absent)}")
    if dtype not in CACHE_DTYPES:
        raise ValueError(
            f"dtype is {dtype!r}, expected one of {', '.join(CACHE_DTYPES)}: rechunk --dtype makes int8 of such a store"
        )
    text: Any = SimpleNamespace(**{"model_type": "", **target_config})
    is_source = hasattr(tokens, "identity")
    source = cast("Source", tokens) if is_source else GivenTokens(cast("Tokens", tokens), seq_length, text.vocab_size)
    ids = validate_target_layer_ids(layer_ids, int(text.num_hidden_layers), explicit=False)
    config = PrecomputeConfig(
        target_model=target_model,
        input_data="",
        output_dir=fspath(path),
        seq_length=seq_length,
        target_layer_ids=tuple(ids),
        shard_size=shard_size,
        dtype=dtype,
        codec=codec,
    )
    schema = new_schema(config, text, ids, source)
    manifest: dict[str, JsonValue] = {
        **peer_identity(config, text, ids, "", dtype),
        "source": source.identity(),
        "pad_token_id": pad_token_id,
        "codec": schema.codec,
        "chunk_tokens": schema.chunk_tokens,
    }
    taken = manifest.keys() & (identity or {}).keys()
    if taken:
        raise ValueError(f"identity has {min(taken)!r}, which the store knows by itself")
    manifest |= identity or {}
    new = StoreRecord(identity_digest(manifest), schema, manifest=manifest, target_config=dict(target_config))
    with ExitStack() as stack:
        stack.enter_context(new_folders_undone(storage.root))
        lock = stack.enter_context(StoreLock(storage, remedy="wait for it, or end it"))
        with new_store_undone(storage, lock.holder):
            record = open_or_create(storage, new, config)
            check_equality_class(storage, record, equality_class, allow=mix_equality_classes)
            clean(storage, record)
            if record.phase == "tokens":
                record = tokenise(storage, record, source, lock.check)
            todo = missing_shards(storage, record.schema)
            if todo:
                facts: dict[str, JsonValue] = {"device": platform.machine(), "equality_class": equality_class}
                before = record.producers if state_ledger(storage, record.schema).committed() else ()
                record = with_producer(replace(record, producers=before), {**facts, **(producer or {})})
                lock.check()
                write_metadata(storage, record)
        return StoreWriter(storage, record, lock.holder, todo, stack.pop_all(), buffer_bytes, open_shards)


def join_store(
    path: str | PathLike[str], key: str, *, buffer_bytes: int = 512 * 1024 * 1024, open_shards: int = 16
) -> StoreWriter:
    """Open a store that another process has made and still holds, to add to it under that process's lock.

    Args:
        path: the store.
        key: `StoreWriter.key` of that process.
        buffer_bytes: as in `create_store`.
        open_shards: as in `create_store`.

    Raises:
        LostLockError: that process has ended, or another one has taken the store over.
        ValueError: the key is none.

    """
    try:
        given = json.loads(key)
        holder, todo = str(given["lock"]), [shard for first, stop in given["todo"] for shard in range(first, stop)]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{key[:60]!r} is no key of a store's writer") from error
    storage = LocalStorage(path)
    check_lock(storage, holder)
    return StoreWriter(storage, read_record(storage), holder, todo, None, buffer_bytes, open_shards)
