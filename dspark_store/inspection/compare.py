"""Two stores side by side: metadata, samples, states, weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dspark_store.format.arrays import array_checksum
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.manifest import BOOKKEEPING_FIELDS, SETTLED_FIELDS, StoreRecord, recorded_only
from dspark_store.format.schema import EMBED, HEAD, HEAD_BIAS
from dspark_store.inspection.state_diff import Matching, StateDifference, compare_states, difference, match_samples
from dspark_store.readers.cache import Cache
from dspark_store.readers.index import TargetWeights

LAYOUT_FIELDS = frozenset({"codec", "chunk_tokens", "shard_size"})
"""Fields of the manifest that change no value; stores that differ in them can hold the same."""


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field in which two stores differ; a missing one is null."""

    field: str
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
        found
        for found in _differing(a.manifest, b.manifest)
        if found.field not in LAYOUT_FIELDS | only_recorded | BOOKKEEPING_FIELDS | SETTLED_FIELDS
    ]
    named = {found.field for found in identity}
    shapes = [found for found in _differing(a.schema.layout(), b.schema.layout()) if found.field not in named]
    layout = [found for found in shapes if found.field in LAYOUT_FIELDS | {"sources"}]
    # stores without a manifest have their shape in the layout alone
    identity += [found for found in shapes if found.field in ("hidden_size", "seq_length", "dtype", "layer_ids")]
    identity += _both_known("target_config", a.target_config, b.target_config)
    identity += _differing(a.head, b.head, "head.")
    recorded = [found for found in _differing(a.manifest, b.manifest) if found.field in only_recorded]
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


@dataclass(frozen=True, slots=True)
class WeightDifference:
    """A vocabulary table that is not the same in both stores: its largest difference, or in words what is other."""

    path: str
    largest: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class StoreComparison:
    """What two stores have in common, and what not.

    ``samples`` matches all of their samples, ``comparable`` of which are captured in both. ``layers`` are those that
    were compared, ``only_a`` and ``only_b`` those that one of them lacks. ``exact`` says that both have one dtype,
    otherwise values were compared as float32.
    """

    metadata: MetadataDifference
    samples: Matching
    comparable: int
    layers: tuple[int, ...]
    only_a: tuple[int, ...]
    only_b: tuple[int, ...]
    exact: bool
    states: StateDifference
    weights: tuple[WeightDifference, ...]

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs of all that was compared; layout and what is only recorded do not count."""
        same_samples = not len(self.samples.only_a) and not len(self.samples.only_b) and not self.samples.moved
        same_layers = not self.only_a and not self.only_b
        same_states = self.states.compared == self.states.equal
        return not self.metadata.identity and same_samples and same_layers and same_states and not self.weights


def compare_stores(
    a: Cache,
    b: Cache,
    *,
    samples: int | None = None,
    layers: Sequence[int] | None = None,
    threads: int | None = None,
) -> StoreComparison:
    """Compare two stores, finished or growing; of growing ones the shards that are committed in both.

    ``samples`` bounds how many samples' states are compared, chosen at random and always the same ones; ``layers``
    which captured layers. Raises ValueError where nothing can be compared or a layer is not in both, DamagedStoreError
    and OSError where a store cannot be read.
    """
    for cache in (a, b):
        if cache.record.phase == "tokens":
            raise ValueError(f"store at {cache.storage} is still in its token phase: its samples are not known yet")
    common = tuple(layer for layer in a.layer_ids if layer in b.layer_ids)
    missing = [layer for layer in layers or () if layer not in common]
    if missing:
        raise ValueError(f"layer {missing[0]} is not in both stores, which share {list(common)}")
    matching = match_samples(a.index.digest, b.index.digest)
    pairs = matching.kept(_captured(a)[matching.a] & _captured(b)[matching.b])
    if len(matching) and not len(pairs):
        raise ValueError(f"nothing to compare yet: no sample of both {a.storage} and {b.storage} is captured in both")
    comparable, chosen = len(pairs), tuple(layers) if layers is not None else common
    if samples is not None:
        pairs = pairs.kept(np.arange(min(samples, comparable)))  # digests are random numbers, and the same in both
    if a.schema.hidden_size != b.schema.hidden_size:
        pairs = pairs.kept(np.arange(0))
    return StoreComparison(
        metadata=compare_metadata(a.record, b.record),
        samples=matching,
        comparable=comparable,
        layers=chosen,
        only_a=tuple(layer for layer in a.layer_ids if layer not in common),
        only_b=tuple(layer for layer in b.layer_ids if layer not in common),
        exact=a.dtype == b.dtype,
        states=compare_states(a, b, pairs, chosen, threads=threads),
        weights=tuple(compare_weights(a, b)),
    )


def _captured(cache: Cache) -> np.ndarray:
    """Return which samples have their states, (N,) bool."""
    captured = np.zeros(len(cache), bool)
    for shard in cache.index.committed():
        rows = cache.schema.tokens.rows(shard)
        captured[rows.start : rows.stop] = True
    return captured


def compare_weights(a: Cache, b: Cache) -> list[WeightDifference]:
    """Return the vocabulary tables that differ; tables whose stored bytes are the same are not decoded."""
    found: list[WeightDifference] = []
    for path in sorted(a.record.weights.keys() | b.record.weights.keys()):
        one, other = a.record.weights.get(path), b.record.weights.get(path)
        if one is None or other is None:
            found.append(WeightDifference(path, None, f"only in {'A' if other is None else 'B'}"))
        elif list(one) != list(other):
            found.append(WeightDifference(path, None, f"of shape {list(one)} and {list(other)}"))
        elif not _same_bytes(a, b, path):
            largest = _table_difference(a.weights(), b.weights(), path)
            if largest is not None:
                found.append(WeightDifference(path, largest, ""))
    return found


def _same_bytes(a: Cache, b: Cache, path: str) -> bool:
    """Tell whether a table's stored bytes are the same, and are those that both stores have sealed."""
    if a.dtype != b.dtype or a.record.checksums.get(path) != b.record.checksums.get(path):
        return False
    for cache in (a, b):
        spec = cache.schema.weights(cache.record.weights[path])
        if array_checksum(cache.storage, path, spec) != cache.record.checksums.get(path):
            raise DamagedStoreError(f"target weights {path} of {cache.storage} are not the ones that were written")
    return True


def _table_difference(a: TargetWeights, b: TargetWeights, path: str) -> float | None:
    tables = {EMBED: (a.embed, b.embed), HEAD: (a.head, b.head), HEAD_BIAS: (a.bias, b.bias)}
    one, other = tables[path]
    if one is None or other is None:
        raise DamagedStoreError(f"{path} is promised by a store that does not have it")
    return difference(one, other)
