"""Bytes of a store: by column and layer, of its other files, and what its states would take elsewhere."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import batched, chain
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np

from dspark_store.format.ledger import counted_objects
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.metadata import COPY_KEY, ROOT_KEY
from dspark_store.format.schema import COLUMNS, EMBED, HEAD, LAST, LAYERS, TOKEN_OBJECTS, StoreSchema
from dspark_store.format.sizes import of_ragged_rows, padded_bytes, ragged_rows_bytes
from dspark_store.format.storage import LocalStorage
from dspark_store.format.token_shards import TOKEN_VALUES

if TYPE_CHECKING:  # whose torch takes seconds
    from dspark_store.readers.cache import Cache

METADATA, UNFINISHED, OTHER = "metadata", "unfinished", "other"
_FOLDERS = ("index", "ledger", "target")
_FILES_A_TASK, _THREADS = 256, 16


@dataclass(frozen=True, slots=True)
class ColumnSize:
    """Bytes of a column, or of the layer ``layer_id`` in it.

    ``logical_bytes`` are its values at valid positions before compression, None when the lengths are unknown,
    ``padded_bytes`` those at all S positions; ``of_ragged_rows`` is what is stored, of the ragged bf16 rows of K + 1
    vectors of the samples that are counted. Values that stand in an object of `target_last_hidden_states` too count
    there alone: of such a layer, which is ``shared``, both are 0.
    """

    name: str
    layer_id: int | None
    logical_bytes: int | None
    padded_bytes: int
    stored_bytes: int
    of_ragged_rows: float | None
    shared: bool = False


@dataclass(frozen=True, slots=True)
class OtherLayouts:
    """What the samples whose states are there take, and what rivals would take for them.

    ``stored_bytes`` is all of their columns. ``padded_bytes``: NeMo Automodel's safetensors shards, K + 1 vectors at
    all S positions in the cache dtype, ids and mask as int64. ``ragged_bytes``: rows of K + 1 vectors in bf16, ids as
    int32 and mask as a byte, at valid positions only. Both without compression; the ratios are of ``ragged_bytes``.
    """

    samples: int
    tokens: int
    stored_bytes: int
    stored_of_ragged_rows: float | None
    padded_bytes: int
    padded_of_ragged_rows: float | None
    ragged_bytes: int


@dataclass(frozen=True, slots=True)
class ShardRows:
    """Ledger rows of some shards, (n, objects, 2), and what those shards hold: samples (n,), and tokens (n,) if known.

    ``factor`` is by how much more all shards of the kind hold, 1.0 where no row was left out.
    """

    rows: np.ndarray
    samples: np.ndarray
    tokens: np.ndarray | None
    factor: float


def token_sizes(schema: StoreSchema, shards: ShardRows) -> list[ColumnSize]:
    """Return the sizes of ids and mask."""
    objects = [(name, None, np.dtype(dtype).itemsize) for name, (dtype, _) in TOKEN_VALUES.items()]
    rows = shards.rows[:, [TOKEN_OBJECTS.index(name) for name in TOKEN_VALUES]]
    return _object_sizes(schema, objects, shards, rows, np.ones(rows.shape[:2], bool))


def layer_sizes(schema: StoreSchema, shards: ShardRows) -> list[ColumnSize]:
    """Return the sizes of every captured layer, in slot order, and then of the last hidden states."""
    vector = schema.hidden_size * schema.dtype.itemsize
    objects = [(item.column, item.layer_id, vector) for item in schema.state_objects]
    return _object_sizes(schema, objects, shards, shards.rows, counted_objects(shards.rows))


def _object_sizes(
    schema: StoreSchema,
    objects: Sequence[tuple[str, int | None, int]],
    shards: ShardRows,
    rows: np.ndarray,
    counted: np.ndarray,
) -> list[ColumnSize]:
    """Return the sizes of objects by name, layer and bytes per position, where they are ``counted``, (n, objects)."""
    stored = np.where(counted, rows[:, :, 0], np.uint64(0)).sum(axis=0)
    samples = (shards.samples[:, None] * counted).sum(axis=0)
    tokens = None if shards.tokens is None else (shards.tokens[:, None] * counted).sum(axis=0)
    all_tokens = 0 if shards.tokens is None else int(shards.tokens.sum())
    return [
        _size(
            name,
            layer_id,
            int(stored[place]),
            None if tokens is None else int(tokens[place]) * nbytes,
            int(samples[place]) * schema.seq_length * nbytes,
            of_ragged_rows(schema, all_tokens, int(stored[place])),
            shards.factor,
            shared=bool(len(counted)) and not counted[:, place].any(),
        )
        for place, (name, layer_id, nbytes) in enumerate(objects)
    ]


def shared_slot(cache: Cache, shards: Iterable[int]) -> int | None:
    """Return the layer slot whose object is that of the last hidden states in all of some captured shards.

    None where there is none, and where another tool has encoded either column anew.
    """
    if {LAYERS, LAST} & cache.foreign_columns:
        return None
    first, layers = len(TOKEN_OBJECTS), cache.schema.num_layers
    slots = set(range(layers))
    for shard in shards:
        last = cache.index.object_record(shard, first + layers)
        slots = {slot for slot in slots if cache.index.object_record(shard, first + slot) == last}
    return min(slots, default=None)


def shares_tables(record: StoreRecord) -> bool:
    """Tell whether a store's head is its embedding, of which the objects are then the same."""
    return HEAD in record.weights and record.checksums.get(HEAD) == record.checksums.get(EMBED)


def column_sizes(parts: Sequence[ColumnSize]) -> list[ColumnSize]:
    """Return the sizes of the two columns of states, from those of `layer_sizes`."""
    return [total_size(name, [part for part in parts if part.name == name]) for name in (LAYERS, LAST)]


def compare(schema: StoreSchema, samples: int, tokens: int, stored: int) -> OtherLayouts:
    """Compare ``stored`` bytes, of samples whose states are there, with what rivals take for them."""
    padded, ragged = padded_bytes(schema, samples), ragged_rows_bytes(schema, tokens)
    ours, theirs = (of_ragged_rows(schema, tokens, count) for count in (stored, padded))
    return OtherLayouts(samples, tokens, stored, ours, padded, theirs, ragged)


def total_size(name: str, parts: Sequence[ColumnSize]) -> ColumnSize:
    """Return the sizes of some columns or layers together, under one name."""
    logical = [part.logical_bytes for part in parts if part.logical_bytes is not None]
    known = len(logical) == len(parts)
    stored, padded = sum(part.stored_bytes for part in parts), sum(part.padded_bytes for part in parts)
    ratios = [part.of_ragged_rows for part in parts if part.of_ragged_rows is not None]
    ratio = sum(ratios) if len(ratios) == len(parts) else None
    return _size(name, None, stored, sum(logical) if known else None, padded, ratio, 1.0)


def _size(
    name: str,
    layer_id: int | None,
    stored: int,
    logical: int | None,
    padded: int,
    ratio: float | None,
    factor: float,
    *,
    shared: bool = False,
) -> ColumnSize:
    whole = None if logical is None else round(logical * factor)
    return ColumnSize(name, layer_id, whole, round(padded * factor), round(stored * factor), ratio, shared)


@dataclass(frozen=True, slots=True)
class FileGroup:
    """Files of one kind: how many there are and their bytes, a file with several names once."""

    name: str
    files: int
    bytes: int


def files_beside(storage: LocalStorage) -> tuple[FileGroup, ...]:
    """Return the files of a store that are no objects of its columns.

    They are grouped as ``index``, ``ledger``, ``target`` (its vocabulary tables), ``metadata`` (every ``zarr.json``
    and the root's copy), ``unfinished`` (what writers have not yet made visible there) and ``other``. The columns'
    folders, which may hold hundreds of thousands of objects, are not listed; what interrupted writers left in them is
    not counted.
    """
    files = [*_walk(storage.root), *((METADATA, f"{storage.root / name / ROOT_KEY}") for name in COLUMNS)]
    groups = {name: [0, 0] for name in (*_FOLDERS, METADATA, UNFINISHED, OTHER)}
    seen: set[tuple[int, int]] = set()
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="stat") as pool:
        sizes = chain.from_iterable(pool.map(_file_sizes, batched(files, _FILES_A_TASK)))
    for name, identity, nbytes in sizes:
        if identity not in seen:
            seen.add(identity)
            groups[name][0] += 1
            groups[name][1] += nbytes
    return tuple(FileGroup(name, files, nbytes) for name, (files, nbytes) in groups.items())


def _walk(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (group, path) of the files of a store that stand in no column's folder; no link to a folder is followed."""
    for directory, folders, names in os.walk(root):
        place = Path(directory).relative_to(root)
        if not place.parts:
            folders[:] = [folder for folder in folders if folder not in COLUMNS]
        for name in names:
            yield _group_of(name, "".join(place.parts[:1])), f"{directory}/{name}"


def _group_of(name: str, folder: str) -> str:
    if name.startswith(".") and name.endswith(".tmp"):
        return UNFINISHED
    if name in (ROOT_KEY, PurePosixPath(COPY_KEY).name):
        return METADATA
    return folder if folder in _FOLDERS else OTHER


def _file_sizes(files: Sequence[tuple[str, str]]) -> list[tuple[str, tuple[int, int], int]]:
    """Return (group, what identifies the file, bytes) of the files that are still there."""
    sizes = []
    for group, path in files:
        try:
            found = Path(path).stat()
        except OSError as error:  # a writer may have replaced it since it was listed; a link may lead nowhere
            if error.errno not in (errno.ENOENT, errno.ELOOP):
                raise
            continue
        sizes.append((group, (found.st_dev, found.st_ino), found.st_size))
    return sizes
