"""Caches of other projects, read as they are and written as a store: bit by bit, a shard at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch
from safetensors import SafetensorError, safe_open

from dspark_store.compat.automodel import (
    CACHE_KEYS,
    DTYPE_MAP,
    existing_shard_indices,
    manifest_mismatch_fields,
    read_manifest,
    write_manifest,
    write_shard,
    write_target_weights,
)
from dspark_store.format.dtypes import cache_dtype
from dspark_store.format.jsonvalue import JsonFields, JsonValue, parse_json
from dspark_store.format.metadata import has_store
from dspark_store.format.schema import IDS, MASK, MOST_IDS
from dspark_store.format.storage import LocalStorage
from dspark_store.writers.lock import StoreLock

_MANIFEST, _WEIGHTS = "manifest.json", "target_weights.safetensors"
_SHARD = re.compile(r"shard-(\d{6})\.safetensors")
_COUNTS = ("hidden_size", "num_hidden_layers", "seq_length", "num_samples", "shard_size", "target_vocab_size")
_NEEDED = ("target_model", "dtype", "target_layer_ids")
_TABLES = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class FoundCache:
    """A cache of NeMo Automodel's DSpark recipe: its folder, its manifest, and the files of its shards, in order."""

    folder: Path
    manifest: Mapping[str, JsonValue]
    shards: tuple[Path, ...]

    @property
    def has_weights(self) -> bool:
        """Whether the target's embedding and head are there."""
        return (self.folder / _WEIGHTS).exists()

    def told(self) -> str:
        """Return in a line what it is and what it lacks."""
        layers = " ".join(map(str, cast("list[int]", self.manifest["target_layer_ids"])))
        weights = "" if self.has_weights else "; the target's weights are missing, which training needs"
        return (
            f"NeMo Automodel cache: {self.manifest['num_samples']:,} samples in {len(self.shards)} shards, "
            f"layers {layers}, {self.manifest['dtype']}{weights}"
        )


def find_cache(folder: str | PathLike[str]) -> FoundCache:
    """Recognise a cache in a folder and look whether all of its files are there; no tensor is read.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is of another kind or version, still being written, or lacks shards.

    """
    place = Path(folder)
    if not (place / _MANIFEST).is_file():
        raise FileNotFoundError(f"{place} has no {_MANIFEST}: it is no cache of NeMo Automodel, the one that is known")
    manifest = _manifest(place / _MANIFEST)
    if manifest.get("format_version") != 1:
        raise ValueError(f"{place} has format_version {manifest.get('format_version')!r}, expected 1")
    if manifest.get("complete", True) is not True:
        raise ValueError(f"{place} is incomplete: its precompute was interrupted or still runs; finish it first")
    samples, size = cast(int, manifest["num_samples"]), cast(int, manifest["shard_size"])
    found = {int(match[1]): path for path in place.iterdir() if (match := _SHARD.fullmatch(path.name))}
    wanted = range(-(-samples // size))
    if sorted(found) != list(wanted):
        lacking, more = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
        raise ValueError(f"{place} says {len(wanted)} shards: missing {lacking[:5]}, extra {more[:5]}")
    return FoundCache(place, manifest, tuple(found[shard] for shard in wanted))


def _manifest(path: Path) -> Mapping[str, JsonValue]:
    """Read a cache's manifest; ValueError naming file and field where one that is needed is not as it must be."""
    try:
        fields = JsonFields.of(parse_json(path.read_bytes()), "it")
        absent = sorted({*_COUNTS, *_NEEDED} - fields.fields.keys())
        if absent:
            raise ValueError(f"it lacks {', '.join(absent)}")
        for name in _COUNTS:
            fields.count(name, 1, MOST_IDS)
        fields.counts("target_layer_ids", -1, MOST_IDS)
        fields.text("target_model")
        cache_dtype(fields.text("dtype"))
    except ValueError as error:
        raise ValueError(f"{path} is not that of a NeMo Automodel cache: {error}") from error
    return fields.fields


def import_cache(
    cache: FoundCache,
    destination: str | PathLike[str],
    *,
    pad_token_id: int | None = None,
    on_shard: Callable[[], None] = lambda: None,
) -> int:
    """Write a cache as a store, or go on with one that was begun so; return how many shards were written.

    Bits stay as they are. The cache does not record where padding begins: rows are stored whole unless `pad_token_id`
    says what a row may end in; a last token that is supervised stays.

    Raises:
        ValueError: a file is cut short or holds something else, by its name, or the store is of another cache.
        BlockingIOError: another job writes to the store.

    """
    storage, manifest = LocalStorage(destination), dict(cache.manifest)
    if pad_token_id is not None:
        manifest["pad_token_id"] = pad_token_id  # so that an import is not gone on with by another
    with StoreLock(storage, remedy="wait for it, or end it"):
        if has_store(storage):
            fields = manifest_mismatch_fields(read_manifest(destination, allow_incomplete=True), manifest)
            if fields:
                raise ValueError(f"the store in {destination} is of another cache or import, by {', '.join(fields)}")
        else:
            write_manifest(destination, {**manifest, "complete": False})
        done = existing_shard_indices(destination)
        for shard, path in enumerate(cache.shards):
            if shard not in done:
                tensors = _read(path, CACHE_KEYS)
                _check_rows(cache, shard, path, tensors)
                lengths = None if pad_token_id is None else _lengths(tensors, pad_token_id)
                write_shard(destination, shard, tensors, lengths)
            on_shard()
        if len(done) < len(cache.shards) or not read_manifest(destination, allow_incomplete=True)["complete"]:
            _finish(cache, destination, manifest)
    return len(cache.shards) - len(done)


def _finish(cache: FoundCache, destination: str | PathLike[str], manifest: Mapping[str, JsonValue]) -> None:
    if cache.has_weights:
        tables = _read(cache.folder / _WEIGHTS, _TABLES)
        embed, head = (SimpleNamespace(weight=tables[name]) for name in _TABLES)
        write_target_weights(destination, embed, head, DTYPE_MAP[str(cache.manifest["dtype"])])
    write_manifest(destination, {**manifest, "complete": True})


def _read(path: Path, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Read tensors of a safetensors file; ValueError naming the file where it is no such, or lacks one."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{path} is cut short, altered, or lacks a tensor: {error}") from error


def _check_rows(cache: FoundCache, shard: int, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    samples, size = (cast(int, cache.manifest[name]) for name in ("num_samples", "shard_size"))
    rows = min(size, samples - shard * size)
    found = len(tensors[IDS])
    if found != rows:
        raise ValueError(f"{path} has {found} samples, its manifest says {rows}")


def _lengths(tensors: Mapping[str, torch.Tensor], pad_token_id: int) -> list[int]:
    """Return the positions of each row up to the last that is no padding: another id, or supervised."""
    real = (tensors[IDS] != pad_token_id) | (tensors[MASK] == 1)
    places = torch.arange(1, real.shape[1] + 1)
    return cast("list[int]", (real * places).amax(1).tolist())
