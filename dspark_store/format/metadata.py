"""Reading and writing a store's metadata tree: every ``zarr.json``, under one seal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from dspark_store.format.codecs import CRC_BYTES
from dspark_store.format.damage import DamagedStoreError, remedy
from dspark_store.format.jsonvalue import JsonFields, JsonValue, parse_json
from dspark_store.format.manifest import ATTRIBUTE, StoreRecord, parse_record, seal_digest
from dspark_store.format.schema import (
    COLUMNS,
    IDS,
    INDEX_DIGEST,
    INDEX_LENGTH,
    INDEX_OBJECTS,
    INDEX_SUPERVISED,
    LAST,
    LAYERS,
    MASK,
    STATE_LEDGER,
    TOKEN_LEDGER,
    TOKEN_OBJECTS,
    StoreSchema,
    group_document,
    metadata_bytes,
)
from dspark_store.format.storage import DOCUMENT_BYTES, LocalStorage, Storage

ROOT_KEY = "zarr.json"
COPY_KEY = "ledger/states/root.json"
"""A copy of the root's ``zarr.json``, in the folder of an array, where no Zarr reader looks for nodes."""
_SPARE_SHARDS, _SPARE_TABLE_OBJECTS = 64, 1 << 16
"""So many objects a folder may lack whatever it has: a table of the target may be lost as a whole."""
LARGE_SHARD = 1 << 12
"""So many rows a shard may have that no object bears out."""
_SPARE_SAMPLES, _PROBES = 1 << 18, 64
"""So many samples need no proof beside JSON. Of more, so many entries of an array are looked at."""
READ_ATTEMPTS, READ_PAUSE_SECONDS = 6, 0.05
"""How often a growing store is read, and what is waited in between: its writer replaces nodes and root in turn."""
_NODE_BYTES = 256 * 1024

type Nodes = Mapping[str, Mapping[str, JsonValue]]
"""Metadata of arrays and groups below the root, by path."""


@dataclass(frozen=True, slots=True)
class StoreMetadata:
    """A store's attributes and the ``zarr.json`` of every node below its root."""

    record: StoreRecord
    nodes: Nodes


def document_limit(key: str) -> int:
    """Return the most bytes that a document is read of: many nodes are held at a time, and one root."""
    return DOCUMENT_BYTES if key in (ROOT_KEY, COPY_KEY) else _NODE_BYTES


def node_key(path: str) -> str:
    """Return the key of a node's metadata."""
    return f"{path}/{ROOT_KEY}"


def record_nodes(record: StoreRecord) -> Nodes:
    """Return the metadata of every node that a store with these attributes has, parents first."""
    schema = record.schema
    specs = {**schema.columns(), **schema.ledgers()}
    if record.phase != "tokens":
        specs |= schema.token_index()
    if record.complete:
        specs |= schema.final_index()
    specs |= {path: schema.weights(shape) for path, shape in record.weights.items()}
    nodes: dict[str, Mapping[str, JsonValue]] = {}
    for path, spec in specs.items():
        parts = path.split("/")
        for depth in range(1, len(parts)):
            nodes.setdefault("/".join(parts[:depth]), group_document())
        nodes[path] = spec.document()
    return nodes


def write_metadata(storage: Storage, record: StoreRecord) -> None:
    """Write the nodes that are new or differ, then the root with its seal: the root is the commit.

    The copy of the root is written before it. So a complete store has an equal one whatever was interrupted, and a copy
    that is ahead of its root speaks of nothing that is not there.
    """
    nodes = record_nodes(record)
    for path, document in nodes.items():
        key, data = node_key(path), metadata_bytes(document)
        if not storage.exists(key) or storage.read(key) != data:
            storage.put(key, data)
    write_root(storage, {**record.attributes(), "root_copy": COPY_KEY}, nodes)


def write_root(storage: Storage, attributes: Mapping[str, JsonValue], nodes: Nodes) -> None:
    """Seal the attributes together with the nodes, and write them: the copy of the root first, then the root."""
    body = {name: value for name, value in attributes.items() if name != "seal"}
    sealed = {**body, "seal": seal_digest(body, nodes)}
    data = metadata_bytes(group_document({ATTRIBUTE: sealed}))
    storage.put(COPY_KEY, data)
    storage.put(ROOT_KEY, data)


def read_record(storage: Storage) -> StoreRecord:
    """Read the root's attributes only; FileNotFoundError when there is no store."""
    record = parse_record(_root_attributes(storage), str(storage))
    check_extent(storage, record)
    return record


def check_extent(storage: Storage, record: StoreRecord) -> None:
    """Raise DamagedStoreError when the root promises far more shards or rows of weights than there are objects.

    So nothing is sized, and nothing walked, by a number that stands in JSON alone. Damage that leaves half of the
    objects of any one folder is no such case, and is told object by object. While tokens are written the number of
    samples is an announcement, and nothing goes by it.
    """
    schema = record.schema
    if record.phase != "tokens":
        _check_shards(storage, record)
        _check_samples(storage, schema)
    for path, shape in record.weights.items():
        table = schema.weights(shape)
        objects = -(-table.shape[0] // table.chunk[0])
        if objects > _SPARE_TABLE_OBJECTS + 2 * len(storage.list(path)):
            raise DamagedStoreError(_unborne(storage, f"the shape of {path}", objects, "objects"))


def _check_shards(storage: Storage, record: StoreRecord) -> None:
    schema, shards = record.schema, record.schema.tokens.num_shards
    row_bytes = (schema.num_layers + len(TOKEN_OBJECTS) + 1) * 16
    folders = {STATE_LEDGER: 1, TOKEN_LEDGER: 1, IDS: 1, MASK: 1, LAST: 1, LAYERS: max(1, schema.num_layers)}
    if not (
        shards <= _SPARE_SHARDS
        or (record.complete and is_filled(storage, f"{INDEX_OBJECTS}/c.0.0.0", shards, row_bytes))
        or any(shards <= _SPARE_SHARDS + 2 * len(storage.list(path)) // each for path, each in folders.items())
    ):
        raise DamagedStoreError(_unborne(storage, "num_samples", shards, "shards"))
    rows = schema.shard_size
    if rows > LARGE_SHARD and _size(storage, f"{INDEX_LENGTH}/c.0") != 4 * schema.num_samples + CRC_BYTES:
        tokens = [f"{column}/{name}" for column in (IDS, MASK) for name in storage.list(column)[:2]]
        if not any(_size(storage, key) > 20 * rows for key in tokens):  # of the index and trailer of such an object
            raise DamagedStoreError(_unborne(storage, "shard_size", rows, "rows of a shard"))


def _check_samples(storage: Storage, schema: StoreSchema) -> None:
    """Raise DamagedStoreError when neither the index nor the token objects show that there are so many samples."""
    count, shards, rows = schema.num_samples, schema.tokens.num_shards, schema.shard_size
    index = {f"{INDEX_DIGEST}/c.0.0": 16, f"{INDEX_LENGTH}/c.0": 4, f"{INDEX_SUPERVISED}/c.0": 4}
    if count <= _SPARE_SAMPLES or any(is_filled(storage, key, count, width) for key, width in index.items()):
        return
    tokens = storage.list(IDS)  # each row has an entry in the index at the end of one
    if shards > 2 * len(tokens) or not any(is_filled(storage, f"{IDS}/{name}", rows, 16) for name in tokens[:2]):
        raise DamagedStoreError(_unborne(storage, "num_samples", count, "samples"))


def is_filled(storage: Storage, key: str, count: int, width: int) -> bool:
    """Tell whether an object ends in ``count`` entries of ``width`` bytes and a checksum, and most are no hole.

    A file can have any size without a byte of data; entries of these arrays are not zero. Which are looked at, nobody
    can know before.
    """
    try:
        with closing(storage.open(key)) as reader:
            first = reader.size - count * width - CRC_BYTES
            places = np.random.default_rng().integers(0, count, _PROBES) if first >= 0 else []
            return sum(any(reader.read(first + int(place) * width, width)) for place in places) * 2 > _PROBES
    except (OSError, DamagedStoreError):
        return False


def _unborne(storage: Storage, what: str, promised: int, things: str) -> str:
    return f"{what} in {ROOT_KEY} of {storage} means {promised:,} {things}, far more than are there; {remedy(storage)}"


def _size(storage: Storage, key: str) -> int:
    """Return the size of an object, 0 where it cannot be opened."""
    try:
        with closing(storage.open(key)) as reader:
            return reader.size
    except (OSError, DamagedStoreError):
        return 0


def read_seal(storage: Storage) -> str:
    """Read the root's seal, which in a complete store tells its content from any other; FileNotFoundError as above."""
    return str(_root_attributes(storage).get("seal"))


def read_metadata(storage: Storage) -> StoreMetadata:
    """Read and check the whole metadata tree.

    FileNotFoundError when there is no store, DamagedStoreError when a node is missing or the seal does not hold. A
    growing store is read again for a moment: its writer replaces nodes and root one after the other.
    """
    for _ in range(READ_ATTEMPTS - 1):
        try:
            return _read_metadata(storage)
        except DamagedStoreError:
            if read_record(storage).complete:
                break
            time.sleep(READ_PAUSE_SECONDS)
    return _read_metadata(storage)


def _read_metadata(storage: Storage) -> StoreMetadata:
    attributes = _root_attributes(storage)
    record = parse_record(attributes, str(storage))
    check_extent(storage, record)
    nodes = {path: _read_document(storage, node_key(path)) for path in record_nodes(record)}
    if attributes.get("seal") != seal_digest(attributes, nodes):
        raise DamagedStoreError(
            f"the seal of the store at {storage} does not hold: a zarr.json in it was changed; {remedy(storage)}"
        )
    return StoreMetadata(record, nodes)


def sealed_nodes(
    attributes: Mapping[str, JsonValue], own: Nodes, found: Mapping[str, Mapping[str, JsonValue] | None]
) -> Nodes | None:
    """Return the nodes with which a root's seal holds; None: it holds with none.

    They are what the layout gives, ``own``, but for columns that somebody has encoded anew, whose metadata is as
    ``found``. So a node that was changed is told from a root that was: the seal holds over what the node should be.
    """
    others = {column: node for column in COLUMNS if (node := found[column]) not in (None, own[column])}
    for count in range(len(others) + 1):
        for chosen in combinations(others, count):
            nodes = {**own, **{column: others[column] for column in chosen}}
            if seal_digest(attributes, nodes) == attributes.get("seal"):
                return nodes
    return None


def no_store(storage: Storage) -> str:
    """Say that a storage holds no store, or that it is not there at all."""
    missing = isinstance(storage, LocalStorage) and not storage.root.exists()
    return f"there is no directory {storage}" if missing else f"{storage} holds no dspark-store"


def has_store(storage: Storage) -> bool:
    """Tell whether the storage holds a store, finished or not."""
    return storage.exists(ROOT_KEY)


def _root_attributes(storage: Storage) -> Mapping[str, JsonValue]:
    try:
        document = _read_document(storage, ROOT_KEY)
    except DamagedStoreError as error:
        if storage.exists(ROOT_KEY) or storage.exists(COPY_KEY):
            raise
        raise FileNotFoundError(f"manifest not found: {no_store(storage)} (no zarr.json)") from error
    attributes = document.get("attributes")
    record = attributes.get(ATTRIBUTE) if isinstance(attributes, dict) else None
    if not isinstance(record, dict):
        raise ValueError(
            f"manifest not found: the Zarr group at {storage} is no dspark-store (attribute {ATTRIBUTE!r})"
        )
    for name, value in (("zarr_format", 3), ("node_type", "group")):
        if document.get(name) != value:
            raise DamagedStoreError(f"{ROOT_KEY} of {storage} has {name} {document.get(name)!r}, expected {value!r}")
    return record


def root_attributes(text: bytes) -> Mapping[str, JsonValue]:
    """Return the attributes of the text of a root, or of its copy; ValueError when it is neither."""
    fields = JsonFields(JsonFields.of(parse_json(text), ROOT_KEY).table("attributes"), "attributes")
    return fields.table(ATTRIBUTE)


def _read_document(storage: Storage, key: str) -> dict[str, JsonValue]:
    try:
        document = parse_json(storage.read(key, document_limit(key)))
    except FileNotFoundError as error:
        raise DamagedStoreError(f"object {key} is missing from {storage}; {remedy(storage)}") from error
    except ValueError as error:
        raise DamagedStoreError(f"object {key} of {storage} is not JSON: {error}; {remedy(storage)}") from error
    if not isinstance(document, dict):
        raise DamagedStoreError(f"object {key} of {storage} is not a JSON object; {remedy(storage)}")
    return document
