"""Reading and writing a store's metadata tree: every ``zarr.json``, under one seal."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from dspark_store.format.damage import DamagedStoreError, remedy
from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.manifest import ATTRIBUTE, StoreRecord, parse_record, seal_digest
from dspark_store.format.schema import COLUMNS, group_document, metadata_bytes
from dspark_store.format.storage import Storage

ROOT_KEY = "zarr.json"
COPY_KEY = "ledger/states/root.json"
"""A copy of the root's ``zarr.json``, in the folder of an array, where no Zarr reader looks for nodes."""
_ATTEMPTS = 5
_PAUSE_SECONDS = 0.05

type Nodes = Mapping[str, Mapping[str, JsonValue]]
"""Metadata of arrays and groups below the root, by path."""


@dataclass(frozen=True, slots=True)
class StoreMetadata:
    """A store's attributes and the ``zarr.json`` of every node below its root."""

    record: StoreRecord
    nodes: Nodes


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
    return parse_record(_root_attributes(storage), str(storage))


def read_seal(storage: Storage) -> str:
    """Read the root's seal, which in a complete store tells its content from any other; FileNotFoundError as above."""
    return str(_root_attributes(storage).get("seal"))


def read_metadata(storage: Storage) -> StoreMetadata:
    """Read and check the whole metadata tree.

    FileNotFoundError when there is no store, DamagedStoreError when a node is missing or the seal does not hold. A
    growing store is read again for a moment: its writer replaces nodes and root one after the other.
    """
    for _ in range(_ATTEMPTS):
        try:
            return _read_metadata(storage)
        except DamagedStoreError:
            if read_record(storage).complete:
                break
            time.sleep(_PAUSE_SECONDS)
    return _read_metadata(storage)


def _read_metadata(storage: Storage) -> StoreMetadata:
    attributes = _root_attributes(storage)
    record = parse_record(attributes, str(storage))
    try:
        paths = list(record_nodes(record))
    except (ValueError, TypeError, ArithmeticError, LookupError) as error:
        raise DamagedStoreError(
            f"{ROOT_KEY} of {storage} describes an impossible layout: {error}; {remedy(storage)}"
        ) from error
    nodes = {path: _read_document(storage, node_key(path)) for path in paths}
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


def has_store(storage: Storage) -> bool:
    """Tell whether the storage holds a store, finished or not."""
    return storage.exists(ROOT_KEY)


def _root_attributes(storage: Storage) -> Mapping[str, JsonValue]:
    try:
        document = _read_document(storage, ROOT_KEY)
    except DamagedStoreError as error:
        if storage.exists(ROOT_KEY) or storage.exists(COPY_KEY):
            raise
        raise FileNotFoundError(f"manifest not found: {storage} holds no dspark-store (no zarr.json)") from error
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


def _read_document(storage: Storage, key: str) -> dict[str, JsonValue]:
    try:
        document = json.loads(storage.read(key))
    except FileNotFoundError as error:
        raise DamagedStoreError(f"object {key} is missing from {storage}; {remedy(storage)}") from error
    except ValueError as error:
        raise DamagedStoreError(f"object {key} of {storage} is not JSON: {error}; {remedy(storage)}") from error
    if not isinstance(document, dict):
        raise DamagedStoreError(f"object {key} of {storage} is not a JSON object; {remedy(storage)}")
    return document
