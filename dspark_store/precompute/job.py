"""What a run is about, found out before any weight is loaded: the source, the target's shape, the store's identity."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from dspark_store.format.damage import remedy
from dspark_store.format.dtypes import cache_dtype
from dspark_store.format.grid import default_chunk_tokens
from dspark_store.format.int8 import AIMS
from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.manifest import (
    SETTLED_FIELDS,
    Manifest,
    StoreRecord,
    build_cache_manifest,
    identity_digest,
    mismatch_fields,
    refuse_unfinished_copy,
    stored_manifest,
)
from dspark_store.format.metadata import COPY_KEY, has_store, read_record, write_metadata
from dspark_store.format.schema import StoreSchema
from dspark_store.format.storage import LocalStorage
from dspark_store.precompute.job_target import TargetDescription, describe_target
from dspark_store.precompute.settings import PrecomputeConfig
from dspark_store.precompute.undo import OWN_FOLDERS, is_unfinished_beginning
from dspark_store.sources import Source, apply_chat_template_option, chat_template_sha256, tokenizer_sha256
from dspark_store.sources.identity import chat_rules, comparable
from dspark_store.sources.options import option_values
from dspark_store.sources.registry import SourceContext, SpecValue, build_source, parse_source
from dspark_store.target.batches import batching_fields
from dspark_store.target.device import resolve_compute_dtype
from dspark_store.target.facts import check_capturable, check_fits, target_config_json
from dspark_store.target.fingerprint import target_fingerprint
from dspark_store.target.layers import build_target_layer_ids, validate_target_layer_ids
from dspark_store.target.load import load_tokenizer

_OF_TARGET: tuple[str, ...] = (
    "target_model_type",
    "target_vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "tokenizer_sha256",
)
_OF_TARGET += ("pad_token_id", "target_num_hidden_layers_full")
"""Fields of a manifest that another target's weights bring with them."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run: its settings, the target that it will load, its source of tokens, and the store that it makes."""

    config: PrecomputeConfig
    target: TargetDescription
    source: Source
    new_record: StoreRecord

    @property
    def manifest(self) -> Manifest:
        """The identity that this run gives a store."""
        return self.new_record.manifest


def existing_record(storage: LocalStorage, *, resume: bool) -> StoreRecord | None:
    """Return the record of the store in the output directory, None when it is empty or new.

    ValueError when there is a store and no ``--resume``, shards without a manifest, or something else.
    """
    if has_store(storage):
        record = read_record(storage)
        if not record.manifest:
            raise ValueError(
                f"manifest is missing: {storage.root} holds shards that no precompute wrote; "
                "choose another --output-dir"
            )
        refuse_unfinished_copy(record, str(storage.root))
        if not resume:
            state = (
                "already has shards, and is finished"
                if record.complete
                else "already has shards of an unfinished store"
            )
            raise ValueError(f"{storage.root} {state}: pass --resume to go on with it, or choose another --output-dir")
        return record
    if storage.root.exists() and not storage.root.is_dir():
        raise ValueError(f"{storage.root} is a file; --output-dir must be a new or empty directory")
    names = {path.name for path in storage.root.iterdir()} if storage.root.exists() else set()
    names = {name for name in names if not name.startswith(".")}
    others = names.difference(OWN_FOLDERS)
    if others:
        raise ValueError(
            f"{storage.root} holds something else ({min(others)}); --output-dir must be new, empty or a store"
        )
    if not is_unfinished_beginning(storage.root):
        raise ValueError(
            f"manifest is missing: {storage.root} has a store's arrays but no zarr.json; "
            + (f"{remedy(storage)}, or " if storage.exists(COPY_KEY) else "")
            + "choose another --output-dir"
        )
    return None


def plan_job(
    config: PrecomputeConfig, target: TargetDescription | None = None, recorded: StoreRecord | None = None
) -> Job:
    """Read what is cheap: the target's description, if it is not given, its tokenizer, the source's rows and hash.

    ``recorded`` is the store that is gone on with, whose date for chat templates is used again.
    ValueError, FileNotFoundError or ImportError for whatever a user can get wrong.
    """
    target = target or describe_target(config)
    compute_dtype = resolve_compute_dtype(config.compute_dtype, config.resolved_device)
    layer_ids = _layer_ids(config, target.text)
    tokenizer = load_tokenizer(target.source)
    check_capturable(target.config)
    check_fits(target.config, config.seq_length, max(tokenizer.get_vocab().values(), default=-1) + 1)
    if config.chat_template is not None:  # a source that needs one says so where there is none
        apply_chat_template_option(tokenizer, config.chat_template)
    vocab_size = int(target.text.vocab_size)
    context = _source_context(config, tokenizer, vocab_size, recorded)
    source = build_source(parse_source(config.input_data), context)
    schema = new_schema(config, target.text, layer_ids, source)
    identity: dict[str, JsonValue] = {
        **peer_identity(config, target.text, layer_ids, chat_template_sha256(tokenizer), schema.dtype.name),
        **({} if schema.int8 is None else {"state_dtype": schema.int8}),
        **_target_identity(target),
        "source": source.identity(),
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "pad_token_id": _pad_token_id(tokenizer, vocab_size),
        **batching_fields(config.batch_limit),
        "compute_dtype": str(compute_dtype).removeprefix("torch."),
        "attn_implementation": config.target_attn_implementation,
        "codec": schema.codec,
        "chunk_tokens": schema.chunk_tokens,
        **({} if config.mantissa_bits is None else {"mantissa_bits": config.mantissa_bits}),
    }
    record = StoreRecord(
        identity_digest(identity), schema, manifest=identity, target_config=target_config_json(target.config)
    )
    return Job(config, target, source, record)


def _source_context(
    config: PrecomputeConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int, recorded: StoreRecord | None
) -> SourceContext:
    before = None if recorded is None else recorded.manifest.get("source")
    return SourceContext(
        seq_length=config.seq_length,
        load_tokenizer=lambda: tokenizer,
        vocab_size=vocab_size,
        split=config.split,
        shuffle_seed=config.shuffle_seed,
        seed=42 if config.shuffle_seed is None else config.shuffle_seed,
        max_samples=config.max_samples,
        num_workers=config.num_workers,
        recorded=before if isinstance(before, Mapping) else None,
        **option_values(config),
    )


def check_identity(recorded: StoreRecord, own: StoreRecord, config: PrecomputeConfig) -> None:
    """Raise ValueError (``does not match``) naming every field in which the store differs from this run.

    Fields inside of others are named with dots; those that only follow from one that is named are left out. The rule
    by which conversations become tokens must be the same only while tokens are still to be made.
    """
    place = config.output_dir
    stored, new = recorded.manifest.get("source"), own.manifest.get("source")
    as_stored, as_own = comparable(stored, new)
    same_source = as_stored == as_own
    fields = mismatch_fields(recorded.manifest, own.manifest, SETTLED_FIELDS | ({"source"} if same_source else set()))
    if fields:
        follows = _following(config, fields)
        ours, theirs = {**own.manifest, "source": as_own}, {**recorded.manifest, "source": as_stored}
        details = [
            detail
            for field in fields
            for name, detail in _differences(field, theirs.get(field), ours.get(field))
            if (name not in follows if name == field else name.rpartition(".")[2] not in follows.union(fields))
        ]
        raise ValueError(f"the store in {place} does not match this run in {'; '.join(details)}")
    if recorded.phase == "tokens" and stored != new:
        raise ValueError(
            f"the tokens of the store in {place} are not all there, and those that are were made by "
            f"rule {_told_rules(stored)} for conversations; this version makes them by rule {_told_rules(new)}, which "
            "gives some rows other ids or masks: go on with the version that began the store, or begin a new one"
        )
    refuse_unfinished_copy(recorded, place)
    formed, wanted = recorded.capture_shard_size, own.schema.shard_size
    if recorded.copied_from is not None and formed != wanted:
        raise ValueError(
            f"the store in {place} does not match this run in shard_size: it is a copy of one whose "
            f"batches were formed in shards of {formed}, this run would form them in shards of {wanted}"
        )
    _check_target_config(recorded, own, place)


def open_or_create(storage: LocalStorage, own: StoreRecord, config: PrecomputeConfig) -> StoreRecord:
    """Return the record to go on with. It is read again under the lock: another job may have moved on."""
    if has_store(storage):
        record = read_record(storage)
        check_identity(record, own, config)
        return record
    write_metadata(storage, own)
    return own


def _differences(name: str, stored: JsonValue, own: JsonValue) -> Iterator[tuple[str, str]]:
    """Yield the dotted name of every differing field inside of one, and what it is in the store and in this run."""
    if isinstance(stored, list) and isinstance(own, list) and len(stored) == len(own) and name.endswith("parts"):
        stored, own = (dict(zip(map(str, range(len(parts))), parts, strict=True)) for parts in (stored, own))
    if not isinstance(stored, Mapping) or not isinstance(own, Mapping):
        if stored != own:
            yield name, f"{name}: store {stored!r}, this run {own!r}"
        return
    same_type = stored.get("type") == own.get("type")
    for inner in sorted(stored.keys() | own.keys()) if same_type else ("type",):  # of another type all else differs
        yield from _differences(f"{name}.{inner}", stored.get(inner), own.get(inner))


def _following(config: PrecomputeConfig, fields: Collection[str]) -> set[str]:
    """Return the fields that differ because one of ``fields`` does, unless this run was told them itself."""
    causes = {
        **{name: {"target_weights"} for name in _OF_TARGET},
        "target_hidden_dim": {"target_weights", "hidden_size", "target_layer_ids"},
        "target_last_hidden_dim": {"target_weights", "hidden_size"},
        "split": {"train_split"},  # inside of the source
    }
    if not config.target_layer_ids:
        causes["target_layer_ids"] = {"target_weights", "num_hidden_layers"}
    if not config.chunk_tokens:
        causes["chunk_tokens"] = {"target_weights", "hidden_size", "dtype", "codec", "seq_length"}
    if config.chat_template is None:
        causes["chat_template_sha256"] = {"target_weights", "tokenizer_sha256"}
    return {name for name, why in causes.items() if why & set(fields)}


def _told_rules(source: JsonValue) -> str:
    return " and ".join(map(str, chat_rules(source)))


def _check_target_config(recorded: StoreRecord, own: StoreRecord, place: str) -> None:
    """Refuse a target of the same weights that computes something else with them: other experts a token, say.

    Only what both configurations have is compared, since a newer transformers knows more fields.
    """
    stored, new = recorded.target_config or {}, own.target_config or {}
    differing = sorted(name for name in stored.keys() & new.keys() if stored[name] != new[name])
    if differing:
        details = [
            detail for name in differing for _, detail in _differences(f"target_config.{name}", stored[name], new[name])
        ]
        raise ValueError(f"the store in {place} does not match this run in {'; '.join(details)}")


def _layer_ids(config: PrecomputeConfig, text: PretrainedConfig) -> list[int]:
    depth = int(text.num_hidden_layers)
    ids = config.target_layer_ids or build_target_layer_ids(depth, config.draft_num_hidden_layers)
    return validate_target_layer_ids(ids, depth)


def _written(source: SpecValue) -> str:
    """Return a source as text: upstream's manifest has a path there."""
    return source if isinstance(source, str) else json.dumps(source, default=str, sort_keys=True)


def _pad_token_id(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    """Return an id for padding that has a row in the target's embedding, as one added to the tokenizer may not."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token_id, int) and 0 <= token_id < vocab_size:
            return token_id
    return 0


def new_schema(config: PrecomputeConfig, text: PretrainedConfig, layer_ids: list[int], source: Source) -> StoreSchema:
    """Return the shape of the store, its number of samples still unknown."""
    int8 = config.dtype if config.dtype in AIMS else None
    dtype, width = cache_dtype("bf16" if int8 else config.dtype), int(text.hidden_size)
    chunk_tokens = config.chunk_tokens or default_chunk_tokens(
        width, dtype.itemsize, config.seq_length, compressed=config.codec != "none"
    )
    origins = source.origins()
    schema = StoreSchema(
        num_samples=0,
        shard_size=config.shard_size,
        seq_length=config.seq_length,
        hidden_size=width,
        num_layers=len(layer_ids),
        layer_ids=tuple(layer_ids),
        dtype=dtype,
        codec=config.codec,
        chunk_tokens=min(chunk_tokens, config.seq_length),
        sources=origins if len(origins) > 1 else (),
        mantissa_bits=config.mantissa_bits,
        int8=int8,
    )
    schema.columns()  # a codec whose package is missing is refused here
    return schema


def peer_identity(
    config: PrecomputeConfig, text: PretrainedConfig, layer_ids: list[int], template_sha256: str, dtype: str
) -> Manifest:
    """Return the fields of identity that NeMo Automodel's manifest has."""
    manifest = build_cache_manifest(
        target_model=config.target_model,
        target_model_type=str(text.model_type),
        target_text_config=cast("object", text),  # type: ignore[arg-type] # a transformers config has these fields
        seq_length=config.seq_length,
        dtype=dtype,
        num_samples=0,
        shard_size=config.shard_size,
        target_layer_ids=layer_ids,
        train_data_path=_written(config.input_data),
        train_split=config.split,
        shuffle_seed=config.shuffle_seed,  # type: ignore[arg-type] # upstream knows no unshuffled store
        mask_reasoning_content=config.mask_reasoning_content,
        mask_generation_prompt=config.mask_generation_prompt,
        chat_template_sha256=template_sha256,
    )
    return stored_manifest(manifest)


def _target_identity(target: TargetDescription) -> dict[str, JsonValue]:
    fingerprint = target_fingerprint(target.source)
    cut = {"target_num_hidden_layers_full": target.depth} if target.depth != target.text.num_hidden_layers else {}
    return {"target_weights": fingerprint["weights"], "target_revision": fingerprint["revision"], **cut}
