"""What a copy of a store is to be: its identity, its shape and its bytes, and whether it is already begun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from dspark_store.format.grid import default_chunk_tokens
from dspark_store.format.int8 import AIMS
from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.ledger import distinct_bytes
from dspark_store.format.manifest import CopiedFrom, StoreRecord, identity_digest
from dspark_store.format.metadata import has_store, read_record
from dspark_store.format.schema import HEAD, TOKEN_OBJECTS, StoreSchema
from dspark_store.format.sizes import Volume, distinct_states, ragged_bytes
from dspark_store.format.storage import LocalStorage
from dspark_store.inspection.sizes import shares_tables
from dspark_store.precompute.estimate import stored_range
from dspark_store.precompute.undo import OWN_FOLDERS, is_unfinished_beginning
from dspark_store.readers.cache import Cache
from dspark_store.text import size_text

_SETTINGS = ("codec", "chunk_tokens", "shard_size", "layer_ids", "mantissa_bits", "state_dtype")
_NO_LAYER = -2  # below the embedding's
_CHUNK_BYTES = 20  # of an object's trailer and index, for every chunk that it has room for
_TOKEN_BYTES = 5  # an id and its mask


@dataclass(frozen=True, slots=True)
class CopySettings:
    """What a copy is to have other than its source; None is what the source has.

    ``layers`` are the ids of the captured layers to keep, in any order; their slots stay in the source's.
    ``state_dtype`` is one of `AIMS`.
    """

    codec: str | None = None
    chunk_tokens: int | None = None
    shard_size: int | None = None
    layers: Sequence[int] | None = None
    mantissa_bits: int | None = None
    state_dtype: str | None = None


def copy_record(source: StoreRecord, seal: str, settings: CopySettings) -> StoreRecord:
    """Return the record of a copy that has not begun; ``seal`` is the source's.

    ValueError for settings that no store can have or layers that the source has not, ImportError for a codec whose
    package is missing.
    """
    old = source.schema
    schema = _copy_schema(old, settings)
    origin = CopiedFrom(
        store_id=source.store_id,
        seal=seal,
        capture_shard_size=source.capture_shard_size,
        shard_size=old.shard_size,
        codec=old.codec,
        chunk_tokens=old.chunk_tokens,
        layer_ids=old.layer_ids,
    )
    manifest = {**source.manifest, **_changed_fields(source.manifest, old, schema)}
    return StoreRecord(
        identity_digest(manifest, origin),
        schema,
        manifest=manifest,
        target_config=source.target_config,
        head=source.head,
        producers=source.producers,
        copied_from=origin,
    )


def _copy_schema(old: StoreSchema, settings: CopySettings) -> StoreSchema:
    asked = old.layer_ids if settings.layers is None else settings.layers
    missing = [layer for layer in asked if layer not in old.layer_ids]
    if missing:
        raise ValueError(f"layer {missing[0]} is not in the source, which has {list(old.layer_ids)}")
    layers = tuple(layer for layer in old.layer_ids if layer in asked)
    if not layers:
        raise ValueError("layers must be one or more, got none")
    kept = settings.mantissa_bits
    if kept is not None and old.mantissa_bits not in (None, kept):
        raise ValueError(
            f"mantissa-bits {kept} of a source that is rounded to {old.mantissa_bits} already would round twice: copy "
            "from the store that it was made from"
        )
    codec = settings.codec or old.codec
    chunk_tokens = old.chunk_tokens
    if settings.chunk_tokens is not None:
        chunk_tokens = min(settings.chunk_tokens, old.seq_length)
    elif (codec == "none") != (old.codec == "none"):
        chunk_tokens = default_chunk_tokens(
            old.hidden_size, old.dtype.itemsize, old.seq_length, compressed=codec != "none"
        )
    state_dtype = settings.state_dtype or old.state_dtype
    if state_dtype != old.state_dtype and (state_dtype not in AIMS or old.int8 or old.mantissa_bits):
        raise ValueError(
            f"dtype {state_dtype} cannot be made of the source's {old.values}: keep that, or make "
            f"{' or '.join(AIMS)} of a lossless store"
        )
    scales = {item.layer_id: scale for item, scale in zip(old.state_objects, old.scales, strict=False)}
    schema = replace(
        old if state_dtype == old.state_dtype else old.stored_as(state_dtype),
        scales=tuple(scales[layer] for layer in (*layers, None)) if state_dtype == old.int8 else (),
        codec=codec,
        chunk_tokens=chunk_tokens,
        shard_size=old.shard_size if settings.shard_size is None else settings.shard_size,
        layer_ids=layers,
        num_layers=len(layers),
        mantissa_bits=kept or old.mantissa_bits,
    )
    schema.columns()  # refuses sizes below 1, and a codec whose package is missing
    return schema


def _changed_fields(manifest: Mapping[str, JsonValue], old: StoreSchema, new: StoreSchema) -> dict[str, JsonValue]:
    """Return the fields of a manifest in which the copy differs. A field that the source lacks stays away."""
    fields: dict[str, JsonValue] = {}
    if new.shard_size != old.shard_size:
        fields["shard_size"] = new.shard_size
    if new.layer_ids != old.layer_ids:
        fields["target_layer_ids"] = list(new.layer_ids)
        fields["target_hidden_dim"] = new.num_layers * new.hidden_size
    fields |= {"codec": new.codec, "chunk_tokens": new.chunk_tokens}
    fields = {name: value for name, value in fields.items() if name in manifest}
    if new.int8 is not None:
        fields |= {"dtype": new.dtype.name, "state_dtype": new.int8}
    return fields if new.mantissa_bits is None else {**fields, "mantissa_bits": new.mantissa_bits}


def begun_copy(destination: LocalStorage, wanted: StoreRecord) -> StoreRecord | None:
    """Return the record of a copy that was begun, or finished, by the same command; None where nothing is yet.

    ValueError when the directory holds anything else, naming what is different.
    """
    root = destination.root
    if has_store(destination):
        found = read_record(destination)
        _refuse_another(found, wanted, root)
        return found
    if root.exists() and not root.is_dir():
        raise ValueError(f"{root} is a file; the destination of a copy must be a new or empty directory")
    names = {path.name for path in root.iterdir()} if root.exists() else set()
    others = {name for name in names if not name.startswith(".")}.difference(OWN_FOLDERS)
    if others or not is_unfinished_beginning(root):
        shown = min(others or names)
        raise ValueError(f"{root} holds something else ({shown}); the destination of a copy must be new or empty")
    return None


def _refuse_another(found: StoreRecord, wanted: StoreRecord, root: Path) -> None:
    if found.store_id == wanted.store_id:
        return
    there, asked = found.copied_from, wanted.copied_from
    if there is None or asked is None:
        raise ValueError(f"{root} holds a store that is no copy; choose another destination")
    if there.store_id != asked.store_id:
        raise ValueError(
            f"{root} holds a copy of another store ({there.store_id}, the source is {asked.store_id}); choose another "
            "destination"
        )
    if there.seal != asked.seal:
        raise ValueError(
            f"{root} holds a copy of a store with the source's identity but other content (the source was changed, or "
            "captured anew); choose another destination"
        )
    differing = [
        f"{name} (there {getattr(found.schema, name)!r}, asked for {getattr(wanted.schema, name)!r})"
        for name in _SETTINGS
        if getattr(found.schema, name) != getattr(wanted.schema, name)
    ]
    what = ", ".join(differing) or "something that another version of dspark-store decided"
    raise ValueError(f"{root} holds a copy with another {what}: ask for the same, or choose another destination")


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
        same = schema.mantissa_bits == old.mantissa_bits and schema.int8 == old.int8
        if same and schema.codec == old.codec != "none":
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
            f"no space: about {size_text(coming)}, embedding and head included, are still to be written to "
            f"{destination}, {size_text(free)} are free; free some, or choose another destination"
        )


def _weight_bytes(record: StoreRecord) -> int:
    tables = [shape for path, shape in record.weights.items() if path != HEAD or not shares_tables(record)]
    return sum(prod(shape) for shape in tables) * record.schema.dtype.itemsize


def _source_state_bytes(source: Cache) -> int:
    return int(distinct_bytes(source.index.objects)[:, len(TOKEN_OBJECTS) :].sum())


def _last_layer(record: StoreRecord) -> int:
    """Return the id of the target's last layer, or one that no layer has where the manifest does not say."""
    return record.last_layer if record.manifest.get("num_hidden_layers") is not None else _NO_LAYER
