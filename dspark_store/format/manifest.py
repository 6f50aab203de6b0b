"""The group's attributes: what a store is, how far it is, and the seal over all of its metadata.

The manifest decides identity: two runs with equal manifests write equal stores. Paths and names are recorded for
people and not compared where a digest of the content is, because a moved corpus is the same and an edited one is not.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, Protocol, cast

from dspark_store.format.damage import DamagedStoreError, remedy
from dspark_store.format.jsonvalue import JsonFields, JsonValue, json_digest, shown
from dspark_store.format.schema import (
    HEAD_BIAS,
    MOST_CHUNKS,
    MOST_IDS,
    MOST_LAYERS,
    WEIGHTS,
    StoreSchema,
    parse_layout,
)
from dspark_store.format.shard import LEAST_LAYER

FORMAT_VERSION, FEATURES_VERSION = 1, 2
"""Of a store that every reader knows, and of one that names the ``FEATURES`` which a reader must know beside."""
FEATURES = ("int8",)
ATTRIBUTE = "dspark_store"
BOOKKEEPING_FIELDS = frozenset({"format_version", "complete"})
RECORDED_FIELDS = frozenset({"target_model", "train_data_path", "target_revision"})
"""Manifest fields that are written down and not compared, as far as the digests of `_DIGESTS` are there."""
_DIGESTS = {"train_data_path": "source", "target_model": "target_weights"}
"""The field that tells by content what another one tells by name."""
PEER_DEFAULTS: dict[str, JsonValue] = {"mask_reasoning_content": False, "mask_generation_prompt": False}
"""Fields of the peer format that older manifests lack, with the value that they then have."""
_LATER_FIELDS = frozenset({"mask_generation_prompt"})
SETTLED_FIELDS = frozenset({"num_samples"})
"""Manifest fields that the token phase finds out; they follow from the others."""

_MANIFEST_COUNTS = (
    *("target_vocab_size", "hidden_size", "num_hidden_layers", "seq_length", "num_samples", "shard_size"),
    *("target_hidden_dim", "target_last_hidden_dim", "batch_size", "batch_tokens", "chunk_tokens"),
    *("target_num_hidden_layers_full", "mantissa_bits"),
)
_MANIFEST_TEXTS = (
    *("target_model", "target_model_type", "dtype", "train_data_path", "train_split", "chat_template_sha256"),
    *("tokenizer_sha256", "target_weights", "target_revision", "compute_dtype", "attn_implementation", "codec"),
    "state_dtype",
)

type Manifest = Mapping[str, JsonValue]
type Phase = Literal["tokens", "states", "complete"]

SEMANTICS: dict[str, JsonValue] = {
    "layer_ids": "-1 is the embedding output; i is the output of decoder layer i, counted from 0; the last layer's id "
    "is the state after the final norm",
    "target_last_hidden_states": "the state after the final norm, which lm_head consumes",
    "input_ids": "unshifted",
    "loss_mask": "unshifted: 1 where the token at this very position is supervised",
}


class TextConfig(Protocol):
    """What a manifest needs of a target's text configuration."""

    hidden_size: int
    vocab_size: int
    num_hidden_layers: int


def build_cache_manifest(
    *,
    target_model: str,
    target_model_type: str,
    target_text_config: TextConfig,
    seq_length: int,
    dtype: str,
    num_samples: int,
    shard_size: int,
    target_layer_ids: list[int],
    train_data_path: str,
    train_split: str | None,
    shuffle_seed: int,
    mask_reasoning_content: bool,
    chat_template_sha256: str,
    mask_generation_prompt: bool = False,
) -> dict[str, JsonValue]:
    """Return a manifest's 18 fields: the target, the shapes, and the identity of the input."""
    width = int(target_text_config.hidden_size)
    return {
        "target_model": target_model,
        "target_model_type": target_model_type,
        "target_vocab_size": int(target_text_config.vocab_size),
        "hidden_size": width,
        "num_hidden_layers": int(target_text_config.num_hidden_layers),
        "seq_length": int(seq_length),
        "dtype": dtype,
        "num_samples": int(num_samples),
        "shard_size": int(shard_size),
        "target_hidden_dim": width * len(target_layer_ids),
        "target_last_hidden_dim": width,
        "target_layer_ids": [int(layer) for layer in target_layer_ids],
        "train_data_path": str(train_data_path),
        "train_split": train_split,
        "shuffle_seed": shuffle_seed,
        "mask_reasoning_content": bool(mask_reasoning_content),
        "mask_generation_prompt": bool(mask_generation_prompt),
        "chat_template_sha256": chat_template_sha256,
    }


def stored_manifest(fields: Manifest) -> Manifest:
    """Return a manifest as it is stored: without bookkeeping, and with later fields of the peer format only where set.

    So a store that uses none of these has the identity that it had before there were any.
    """
    later = {name for name in _LATER_FIELDS if fields.get(name) == PEER_DEFAULTS[name]}
    return {name: value for name, value in fields.items() if name not in BOOKKEEPING_FIELDS | later}


def mismatch_fields(recorded: Manifest, manifest: Manifest, ignore: frozenset[str] = frozenset()) -> list[str]:
    """Return the sorted fields whose values differ; a missing field equals its default in `PEER_DEFAULTS`, else null.

    Bookkeeping fields, those of `recorded_only` and ``ignore`` never count.
    """
    exempt = BOOKKEEPING_FIELDS | recorded_only(recorded, manifest) | ignore
    fields = (recorded.keys() | manifest.keys()) - exempt
    recorded, manifest = PEER_DEFAULTS | dict(recorded), PEER_DEFAULTS | dict(manifest)
    return sorted(name for name in fields if recorded.get(name) != manifest.get(name))


def recorded_only(recorded: Manifest, manifest: Manifest) -> frozenset[str]:
    """Return the fields that are not compared between two manifests.

    The path of the data and the name of the target are, where neither manifest tells the content itself: a script
    written for NeMo Automodel knows no more, and compares them too.
    """
    by_name = {name for name, digest in _DIGESTS.items() if recorded.get(digest) is manifest.get(digest) is None}
    return RECORDED_FIELDS - by_name


@dataclass(frozen=True, slots=True)
class CopiedFrom:
    """The store that a copy was made from, whose ``seal`` tells it from every other, and how that one was laid out.

    ``capture_shard_size`` is R of the store that was captured: batches were formed inside of its shards, and a copy of
    a copy still knows it.
    """

    store_id: str
    seal: str
    capture_shard_size: int
    shard_size: int
    codec: str
    chunk_tokens: int
    layer_ids: tuple[int, ...]

    def to_json(self) -> dict[str, JsonValue]:
        """Return the attribute ``copied_from``."""
        return {**asdict(self), "layer_ids": list(self.layer_ids)}

    @classmethod
    def from_json(cls, fields: JsonFields) -> CopiedFrom:
        """Read the attribute back; DamagedStoreError when it is not one."""
        return cls(
            store_id=fields.text("store_id"),
            seal=fields.text("seal"),
            capture_shard_size=fields.count("capture_shard_size", 1, MOST_CHUNKS),
            shard_size=fields.count("shard_size", 1, MOST_CHUNKS),
            codec=fields.text("codec"),
            chunk_tokens=fields.count("chunk_tokens", 1),
            layer_ids=fields.counts("layer_ids", LEAST_LAYER, MOST_LAYERS),
        )


def identity_digest(manifest: Manifest, copied_from: CopiedFrom | None = None) -> str:
    """Return the store id that a manifest gives: 32 hexadecimal digits over all that identity is.

    A copy's is also over what it was copied from, so that it is never that of a capture.
    """
    exempt = BOOKKEEPING_FIELDS | RECORDED_FIELDS | SETTLED_FIELDS
    identity = {name: value for name, value in manifest.items() if name not in exempt}
    return json_digest(identity if copied_from is None else {**identity, "copied_from": copied_from.to_json()})


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """The attributes of a store's group.

    ``phase`` says how far the store is; ``declared_complete`` what its writer last said in the manifest, which counts
    once every shard is there. ``schema`` is the shape of its arrays, ``weights`` the shapes of the target's tables
    by path, ``checksums`` a digest over the stored objects of each array that has no ledger row (index, weights).
    ``copied_from`` is there in a store that `dspark-store rechunk` made.
    """

    store_id: str
    schema: StoreSchema
    phase: Phase = "tokens"
    declared_complete: bool = False
    manifest: Manifest = field(default_factory=dict)
    target_config: Mapping[str, JsonValue] | None = None
    head: Mapping[str, JsonValue] = field(default_factory=dict)
    producers: tuple[Mapping[str, JsonValue], ...] = ()
    weights: Mapping[str, Sequence[int]] = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict)
    copied_from: CopiedFrom | None = None

    @property
    def complete(self) -> bool:
        """Whether the store may be trained from."""
        return self.phase == "complete"

    @property
    def last_layer(self) -> int:
        """The id of the target's last layer, whose feature is the state after the final norm."""
        return operator.index(self.manifest["num_hidden_layers"]) - 1  # type: ignore[arg-type] # an int in JSON

    @property
    def shared_slot(self) -> int | None:
        """The layer slot whose states are the last hidden states themselves; None where the last layer is none of them.

        KeyError when the manifest does not say how many layers the target has.
        """
        ids = self.schema.layer_ids
        return ids.index(self.last_layer) if self.last_layer in ids else None

    @property
    def tied(self) -> bool:
        """Whether the target's head is its embedding, which is then stored once.

        The target itself has told once its tables are written; until then its configuration does.
        """
        return bool(self.head.get("tied", (self.target_config or {}).get("tie_word_embeddings", True)))

    @property
    def capture_shard_size(self) -> int:
        """The samples of a shard when the states were captured: batches were formed inside of such shards."""
        return self.schema.shard_size if self.copied_from is None else self.copied_from.capture_shard_size

    def with_checksums(self, checksums: Mapping[str, str]) -> StoreRecord:
        """Return a copy with these checksums added."""
        return replace(self, checksums={**self.checksums, **checksums})

    def attributes(self) -> dict[str, JsonValue]:
        """Return the value of the attribute ``dspark_store``, without its seal."""
        copied = {} if self.copied_from is None else {"copied_from": self.copied_from.to_json()}
        features = {"features": list(self.schema.features)} if self.schema.features else {}
        return {
            "format_version": FEATURES_VERSION if features else FORMAT_VERSION,
            **features,
            "store_id": self.store_id,
            "phase": self.phase,
            "complete": self.complete,
            "declared_complete": self.declared_complete,
            "manifest": dict(self.manifest),
            "layout": self.schema.layout(),
            "target_config": None if self.target_config is None else dict(self.target_config),
            "head": dict(self.head),
            "semantics": SEMANTICS,
            "producers": [dict(producer) for producer in self.producers],
            "weights": {path: list(shape) for path, shape in self.weights.items()},
            "checksums": self._checksums_in_order(),
            **copied,
        }

    def _checksums_in_order(self) -> dict[str, JsonValue]:
        """Return the checksums as a store gets them when nothing is ever repaired, so that one that was is the same."""
        first, last = self.schema.token_index(), self.schema.final_index()
        ordered = sorted(self.checksums, key=lambda path: 0 if path in first else 2 if path in last else 1)
        return {path: self.checksums[path] for path in ordered}


def parse_record(attributes: Mapping[str, JsonValue], where: str) -> StoreRecord:
    """Read a store's attributes; ValueError for another version or unknown feature, DamagedStoreError if malformed."""
    if (unknown := unknown_format(attributes)) is not None:
        raise ValueError(f"store at {where} has {unknown}")
    try:
        return _parse(JsonFields(attributes, "attributes"))
    except ValueError as error:
        raise DamagedStoreError(f"zarr.json of the store at {where} is malformed: {error}; {remedy(where)}") from error


def unknown_format(attributes: Mapping[str, JsonValue]) -> str | None:
    """Say what of a store's format is not known here; None where all is."""
    version, features = attributes.get("format_version"), attributes.get("features", [])
    if type(version) is not int or version not in (FORMAT_VERSION, FEATURES_VERSION):
        return (
            f"format_version {shown(version)}, this version of dspark-store reads {FORMAT_VERSION} and "
            f"{FEATURES_VERSION}; run the precompute again, or install the version that wrote it"
        )
    unknown = [each for each in features if each not in FEATURES] if isinstance(features, list) else [features]
    if unknown:
        known = ", ".join(FEATURES)
        return f"the feature {shown(unknown[0])}, this version of dspark-store knows {known}; install a newer one"
    return None


def _parse(fields: JsonFields) -> StoreRecord:
    schema = parse_layout(fields.table("layout"))
    manifest = _parse_manifest(JsonFields(fields.table("manifest"), "manifest"))
    if manifest and manifest.get("state_dtype") != schema.int8:
        told = shown(manifest.get("state_dtype"))
        raise DamagedStoreError(f"{fields.where}: state_dtype is {schema.int8}, that of the manifest {told}")
    if manifest and manifest.get("mantissa_bits") != schema.mantissa_bits:
        kept = shown(manifest.get("mantissa_bits"))
        raise DamagedStoreError(f"{fields.where}: mantissa_bits is {schema.mantissa_bits}, that of the manifest {kept}")
    features = fields.texts("features") if fields.has("features") else ()
    if features != schema.features or (fields.count("format_version") == FEATURES_VERSION) != bool(features):
        raise DamagedStoreError(
            f"{fields.where}: features are {list(features)}, the layout has {list(schema.features)}"
        )
    fields.flag("complete")
    if fields.has("semantics"):
        fields.table("semantics")
    checksums = JsonFields(fields.table("checksums"), "checksums")
    producers = [_parse_producer(JsonFields.of(item, "a producer")) for item in fields.items("producers")]
    copied = JsonFields(fields.table("copied_from"), "copied_from") if fields.has("copied_from") else None
    return StoreRecord(
        store_id=fields.text("store_id"),
        schema=schema,
        phase=_parse_phase(fields),
        declared_complete=fields.flag("declared_complete"),
        manifest=manifest,
        target_config=None if fields.is_null("target_config") else fields.table("target_config"),
        head=_parse_head(JsonFields(fields.table("head"), "head")),
        producers=tuple(producers),
        weights=_parse_weights(JsonFields(fields.table("weights"), "weights"), schema),
        checksums={path: checksums.text(path) for path in checksums.fields},
        copied_from=None if copied is None else CopiedFrom.from_json(copied),
    )


def _parse_phase(fields: JsonFields) -> Phase:
    phase = fields.text("phase")
    if phase not in ("tokens", "states", "complete"):
        raise DamagedStoreError(f"{fields.where}: phase is {shown(phase)}, expected tokens, states or complete")
    return cast(Phase, phase)


def _parse_manifest(fields: JsonFields) -> Manifest:
    """Check the fields that something is done with: each is of its type, null or absent."""
    _check_fields(fields, _MANIFEST_COUNTS, fields.count)
    _check_fields(fields, _MANIFEST_TEXTS, fields.text)
    _check_fields(fields, ("pad_token_id",), lambda name: fields.count(name, -MOST_IDS, MOST_IDS))
    _check_fields(fields, ("target_layer_ids",), lambda name: fields.counts(name, LEAST_LAYER, MOST_LAYERS))
    _check_fields(fields, ("source",), fields.table)
    return fields.fields


def _parse_head(fields: JsonFields) -> Mapping[str, JsonValue]:
    _check_fields(fields, ("head_bias", "tied"), fields.flag)
    _check_fields(fields, ("logit_scale", "final_logit_softcapping", "embedding_scale"), fields.number)
    return fields.fields


def _parse_producer(fields: JsonFields) -> Mapping[str, JsonValue]:
    _check_fields(fields, ("host", "device", "equality_class", "parallel"), fields.text)
    _check_fields(fields, ("world_size", "tokens"), fields.count)
    _check_fields(fields, ("tokens_per_second",), fields.number)
    return fields.fields


def _check_fields(fields: JsonFields, names: Iterable[str], check: Callable[[str], object]) -> None:
    for name in names:
        if fields.has(name):
            check(name)


def _parse_weights(fields: JsonFields, schema: StoreSchema) -> Mapping[str, Sequence[int]]:
    """Read the shapes of the target's tables: no other names are paths of the store."""
    shapes = {path: list(fields.counts(path, 1, MOST_IDS)) for path in fields.fields if path in WEIGHTS}
    for path in fields.fields:
        if path not in shapes:
            raise DamagedStoreError(f"{fields.where}: {shown(path)} is no table of a target: {', '.join(WEIGHTS)}")
        shape, expected = shapes[path], "(V,)" if path == HEAD_BIAS else f"(V, {schema.hidden_size})"
        if (len(shape), *shape[1:]) != ((1,) if path == HEAD_BIAS else (2, schema.hidden_size)):
            raise DamagedStoreError(f"{fields.where}: {path} has the shape {shape}, expected {expected}")
    return shapes


def refuse_unfinished_copy(record: StoreRecord, where: str) -> None:
    """Raise ValueError when a store is a copy that was interrupted: only what began it can finish it."""
    if record.copied_from is not None and not record.complete:
        raise ValueError(
            f"{where} holds an unfinished copy of another store: go on with dspark-store rechunk, or choose another "
            "directory"
        )


def seal_digest(attributes: Mapping[str, JsonValue], nodes: Mapping[str, JsonValue]) -> str:
    """Return the seal: a digest over the attributes (without their seal) and every node's ``zarr.json``.

    ``nodes`` maps a node's path to its parsed metadata; the root's own is not among them.
    """
    body = {name: value for name, value in attributes.items() if name != "seal"}
    return json_digest({"attributes": body, "nodes": dict(nodes)})
