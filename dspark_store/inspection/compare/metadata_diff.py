"""Where the metadata of two stores differ: what they are, how they are laid out, what is only written down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.manifest import BOOKKEEPING_FIELDS, SETTLED_FIELDS, StoreRecord, recorded_only

LAYOUT_FIELDS = frozenset({"codec", "chunk_tokens", "shard_size"})
"""Fields of the manifest that change no value; stores that differ in them can hold the same."""


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field in which two stores differ; a missing one is null."""

    name: str
    a: JsonValue
    b: JsonValue


@dataclass(frozen=True, slots=True)
class MetadataDifference:
    """``identity``: what would make other values; ``layout``: only other bytes; ``recorded``: never compared."""

    identity: tuple[FieldDifference, ...]
    layout: tuple[FieldDifference, ...]
    recorded: tuple[FieldDifference, ...]


def compare_metadata(a: StoreRecord, b: StoreRecord) -> MetadataDifference:
    """Compare two stores' manifests, layouts, target configurations and facts of the head."""
    only_recorded = recorded_only(a.manifest, b.manifest)
    identity = [
        field
        for field in _differing(a.manifest, b.manifest)
        if field.name not in LAYOUT_FIELDS | only_recorded | BOOKKEEPING_FIELDS | SETTLED_FIELDS
    ]
    named = {field.name for field in identity}
    shapes = [field for field in _differing(a.schema.layout(), b.schema.layout()) if field.name not in named]
    layout = [field for field in shapes if field.name in LAYOUT_FIELDS | {"sources"}]
    # stores without a manifest have their shape in the layout alone
    identity += [field for field in shapes if field.name in ("hidden_size", "seq_length", "dtype", "layer_ids")]
    identity += _both_known("target_config", a.target_config, b.target_config)
    identity += _differing(a.head, b.head, "head.")
    recorded = [field for field in _differing(a.manifest, b.manifest) if field.name in only_recorded]
    return MetadataDifference(tuple(identity), tuple(layout), tuple(recorded))


def _differing(a: Mapping[str, JsonValue], b: Mapping[str, JsonValue], prefix: str = "") -> list[FieldDifference]:
    """Return the fields that differ, by name; of a field that holds fields itself, those in it, as ``source.split``."""
    found: list[FieldDifference] = []
    for name in sorted(a.keys() | b.keys()):
        own, other = a.get(name), b.get(name)
        if isinstance(own, dict) and isinstance(other, dict):
            found += _differing(own, other, f"{prefix}{name}.")
        elif own != other:
            found.append(FieldDifference(prefix + name, own, other))
    return found


def _both_known(
    what: str, a: Mapping[str, JsonValue] | None, b: Mapping[str, JsonValue] | None
) -> list[FieldDifference]:
    """Compare what both have, since a newer transformers knows more fields."""
    if a is None or b is None:
        return [] if a is b else [FieldDifference(what, dict(a) if a else None, dict(b) if b else None)]
    shared = a.keys() & b.keys()
    own, other = ({name: fields[name] for name in shared} for fields in (a, b))
    return _differing(own, other, f"{what}.")
