"""The root's ``zarr.json`` and its copy: which of them holds, and with which ``zarr.json`` below it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass

from dspark_store.format.arrays import array_checksum
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.jsonvalue import JsonValue, parse_json
from dspark_store.format.manifest import ATTRIBUTE, StoreRecord, parse_record, seal_digest, unknown_format
from dspark_store.format.metadata import (
    COPY_KEY,
    ROOT_KEY,
    Nodes,
    check_extent,
    document_limit,
    node_key,
    record_nodes,
    root_attributes,
    sealed_nodes,
)
from dspark_store.format.schema import COLUMNS, IDS, MASK, ArraySpec, group_document, metadata_bytes
from dspark_store.format.shard import read_tail
from dspark_store.format.storage import Storage

_LOOKED_AT = 8


class BeyondRepairError(ValueError):
    """What is damaged in a store can neither be proved from the rest of it, nor made again."""

    exit_code = 1
    kind = "cannot be repaired"


@dataclass(frozen=True, slots=True)
class SealedRoot:
    """The attributes of a root or of its copy, and the metadata below it with which its seal holds."""

    attributes: Mapping[str, JsonValue]
    record: StoreRecord
    nodes: Nodes

    @property
    def data(self) -> bytes:
        """The text of the ``zarr.json``."""
        return metadata_bytes(group_document({ATTRIBUTE: self.attributes}))

    @property
    def has_copy(self) -> bool:
        """Whether it was written together with a copy."""
        return self.attributes.get("root_copy") == COPY_KEY

    @property
    def foreign(self) -> frozenset[str]:
        """The columns that are not stored as this package writes them: somebody has encoded them anew."""
        own = record_nodes(self.record)
        return frozenset(path for path in COLUMNS if self.nodes[path] != own[path])

    def changed(self, record: StoreRecord) -> SealedRoot:
        """Return the root with another record, sealed anew."""
        nodes = {**record_nodes(record), **{path: self.nodes[path] for path in self.foreign}}
        attributes = {**record.attributes(), "root_copy": COPY_KEY}
        return SealedRoot({**attributes, "seal": seal_digest(attributes, nodes)}, record, nodes)


def find_root(storage: Storage) -> SealedRoot:
    """Return what the root of a store was, by its own text or by its copy's; BeyondRepairError when neither holds.

    Where both hold and differ, it is the one that contradicts the store less, and the root itself among equals.
    """
    sealed = [found for key in (ROOT_KEY, COPY_KEY) if (found := read_sealed(storage, key)) is not None]
    owners = [found for found in sealed if _owns(storage, found.record)]
    if not owners:
        _refuse_another_version(storage)
        what = "is of another store than the objects" if sealed else "is damaged"
        raise BeyondRepairError(
            f"{ROOT_KEY} of {storage} {what}, and no good copy {COPY_KEY} is left (older stores have none): "
            "nothing else holds the manifest; put the file back from a backup, or precompute into a new --output-dir"
        )
    return min(owners, key=lambda found: _contradictions(storage, found.record))


def _refuse_another_version(storage: Storage) -> None:
    """Refuse a store of a format that is not known here, as root and copy agree, in the words of the readers."""
    found = [attributes for key in (ROOT_KEY, COPY_KEY) if (attributes := _attributes(storage, key)) is not None]
    if found and all(unknown_format(attributes) is not None for attributes in found):
        parse_record(found[0], str(storage))


def mend_metadata(storage: Storage, root: SealedRoot) -> list[str]:
    """Write every ``zarr.json``, and the copy, that is not what ``root`` says; the root last. Return their keys."""
    wanted = {node_key(path): metadata_bytes(document) for path, document in root.nodes.items()}
    own = record_nodes(root.record)
    mended = []
    for path, document in root.nodes.items():
        key = node_key(path)
        # the text of an array that somebody encoded anew is his own
        right = wanted[key] == _read(storage, key) if document == own[path] else _document(storage, key) == document
        if not right:
            storage.put(key, wanted[key])
            mended.append(key)
    for key in (COPY_KEY, ROOT_KEY) if root.has_copy else (ROOT_KEY,):
        if _read(storage, key) != root.data:
            storage.put(key, root.data)
            mended.append(key)
    return mended


def read_sealed(storage: Storage, key: str) -> SealedRoot | None:
    """Read a root or its copy; None when it is no such text, or its seal holds with no ``zarr.json`` that fits it."""
    attributes = _attributes(storage, key)
    if attributes is None:
        return None
    try:
        record = parse_record(attributes, str(storage))
        check_extent(storage, record)
        own = record_nodes(record)
    except ValueError:
        return None
    nodes = sealed_nodes(attributes, own, {path: _document(storage, node_key(path)) for path in COLUMNS})
    return None if nodes is None else SealedRoot(attributes, record, nodes)


def _owns(storage: Storage, record: StoreRecord) -> bool:
    """Tell whether most of the objects that are looked at name this store, or there are none.

    A root that was put in the place of another must not make the objects of that one worthless.
    """
    looked, own = 0, []
    for column in COLUMNS:
        grid = record.schema.tokens if column in (IDS, MASK) else record.schema.states
        for name in [name for name in storage.list(column) if name != ROOT_KEY][:_LOOKED_AT]:
            looked += 1
            with suppress(DamagedStoreError, OSError), closing(storage.open(f"{column}/{name}")) as reader:
                own.append(read_tail(reader, grid).label.store_id == record.store_id)
    return not own or 2 * sum(own) > len(own)


def _contradictions(storage: Storage, record: StoreRecord) -> int:
    """Count the arrays of which the store holds others than the record has the checksums of."""
    schema = record.schema
    specs = {**schema.token_index(), **schema.final_index()}
    specs |= {path: schema.weights(shape) for path, shape in record.weights.items()}
    return sum(_checksum(storage, path, specs) != checksum for path, checksum in record.checksums.items())


def _checksum(storage: Storage, path: str, specs: Mapping[str, ArraySpec]) -> str | None:
    try:
        return array_checksum(storage, path, specs[path])
    except (DamagedStoreError, KeyError, OSError):
        return None


def _read(storage: Storage, key: str) -> bytes | None:
    try:
        return storage.read(key, document_limit(key))
    except OSError:
        return None


def _attributes(storage: Storage, key: str) -> Mapping[str, JsonValue] | None:
    try:
        return root_attributes(_read(storage, key) or b"")
    except ValueError:
        return None


def _document(storage: Storage, key: str) -> dict[str, JsonValue] | None:
    try:
        document = parse_json(_read(storage, key) or b"")
    except ValueError:
        return None
    return document if isinstance(document, dict) else None
