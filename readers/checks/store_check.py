"""What a store has once: the root, the nodes below it and the seal over both; the index; the target's tables."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
from crc32c import crc32c

from dspark_store.format.arrays import DIGEST_BYTES, array_keys, object_limit, unpack_array
from dspark_store.format.damage import DamagedStoreError, Part, Problem
from dspark_store.format.jsonvalue import JsonValue, canonical_json, parse_json
from dspark_store.format.manifest import ATTRIBUTE, StoreRecord, parse_record, seal_digest
from dspark_store.format.metadata import (
    COPY_KEY,
    READ_ATTEMPTS,
    READ_PAUSE_SECONDS,
    ROOT_KEY,
    document_limit,
    node_key,
    read_record,
    record_nodes,
    root_attributes,
    sealed_nodes,
)
from dspark_store.format.schema import (
    COLUMNS,
    INDEX_LENGTH,
    INDEX_SOURCE,
    INDEX_STATUS,
    INDEX_SUPERVISED,
    ArraySpec,
    StoreSchema,
    group_document,
    metadata_bytes,
)
from dspark_store.format.storage import Storage
from dspark_store.readers.checks.findings import describe_error

_NOT_SEALED = "is whole, but not the one that was sealed"
_SUSPICIOUS = 3

type Document = Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True)
class CheckedMetadata:
    """What a store's metadata says, as far as it can be trusted.

    ``record`` is None when it cannot: then nothing else of the store can be checked. ``foreign`` are the columns that
    somebody rewrote with other codecs or chunks.
    """

    record: StoreRecord | None
    foreign: frozenset[str]
    problems: tuple[Problem, ...]


def check_metadata(storage: Storage) -> CheckedMetadata:
    """Check the root and every node.

    Raises FileNotFoundError or ValueError where there is no store at all. A growing store is looked at again for a
    moment, because its writer replaces nodes and root one after the other.
    """
    checked = _check(storage)
    for _ in range(READ_ATTEMPTS - 1):
        if not checked.problems or checked.record is None or checked.record.complete:
            break
        time.sleep(READ_PAUSE_SECONDS)
        checked = _check(storage)
    return checked


def _check(storage: Storage) -> CheckedMetadata:
    try:
        record = read_record(storage)
        expected = record_nodes(record)
    except (OSError, ValueError) as error:
        if not any(storage.exists(node_key(column)) for column in COLUMNS):
            raise
        told = f"cannot be read: {error}" if storage.exists(ROOT_KEY) else "is missing"
        return CheckedMetadata(None, frozenset(), (_root_problem(told),))
    text = storage.read(ROOT_KEY)
    root = cast(Document, parse_json(text))
    texts = {path: _read(storage, node_key(path)) for path in expected}
    nodes = {path: _parse(stored) for path, stored in texts.items()}
    attributes = cast("Mapping[str, Document]", root["attributes"])[ATTRIBUTE]  # read_record has looked
    problems = list(_check_root(root, attributes, text))
    sealed = sealed_nodes(attributes, expected, nodes)
    foreign = None if sealed is None else frozenset(path for path in COLUMNS if sealed[path] != expected[path])
    believed = foreign is not None
    if foreign is None:
        problems.append(_root_problem("the seal does not hold: it was changed, or a column's that was re-encoded"))
        believed = any(nodes[column] == expected[column] for column in COLUMNS)
    else:
        problems += _check_copy(storage, attributes, complete=record.complete)
    for path, document in expected.items():
        exempt = path in (foreign or ()) or not believed
        problems += _check_node(path, document, texts[path], nodes[path], exempt=exempt)
    return CheckedMetadata(record if believed else None, foreign or frozenset(), tuple(problems))


def _check_root(root: Document, attributes: Document, text: bytes) -> Iterator[Problem]:
    if not _is_same(root, group_document({ATTRIBUTE: attributes})):
        yield _root_problem("has fields or attributes that no writer wrote")
    elif not _is_as_written(root, text):
        yield _root_problem("is not the text that was written, though it says the same")


def _check_copy(storage: Storage, attributes: Document, *, complete: bool) -> Iterator[Problem]:
    """Check the copy of a root whose seal holds. Stores from before there were copies do not promise one.

    While a store grows, the copy may be ahead of its root, after a crash between the two.
    """
    if attributes.get("root_copy") != COPY_KEY:
        return
    text = _read(storage, COPY_KEY)
    if isinstance(text, Exception):
        message = "is missing" if isinstance(text, FileNotFoundError) else f"cannot be read: {text}"
        yield Problem(Part.ROOT, COPY_KEY, None, (), message)
    elif text != metadata_bytes(group_document({ATTRIBUTE: attributes})) and (complete or not _is_sealed(text)):
        yield Problem(Part.ROOT, COPY_KEY, None, (), f"is not a copy of {ROOT_KEY}")


def _is_sealed(text: bytes) -> bool:
    """Tell whether a root's text holds by itself: its seal, over the metadata that its layout gives."""
    try:
        attributes = root_attributes(text)
        return seal_digest(attributes, record_nodes(parse_record(attributes, COPY_KEY))) == attributes.get("seal")
    except ValueError:
        return False


def _check_node(
    path: str, expected: Document, text: bytes | Exception, found: Document | None, *, exempt: bool
) -> Iterator[Problem]:
    """Yield what is wrong with a node; one that is ``exempt`` may hold anything."""

    def problem(message: str) -> Problem:
        return Problem(Part.NODE, node_key(path), None, (), message)

    if isinstance(text, FileNotFoundError):
        yield problem("is missing")
    elif isinstance(text, Exception):
        yield problem(f"cannot be read: {text}")
    elif found is None:
        yield problem("is not a JSON object")
    elif exempt:
        return
    elif not _is_same(found, expected):
        yield problem("is not the one that was sealed")
    elif not _is_as_written(found, text):
        yield problem("is not the text that was written, though it says the same")


def _is_same(found: Document, expected: Document) -> bool:
    """Tell whether two documents are one: to Python 3 is 3.0, and 1 is true."""
    return canonical_json(found) == canonical_json(expected)


def _is_as_written(document: Document, text: bytes) -> bool:
    return metadata_bytes(document) == text


def _read(storage: Storage, key: str) -> bytes | Exception:
    try:
        return storage.read(key, document_limit(key))
    except OSError as error:
        return error


def _parse(text: bytes | Exception) -> Document | None:
    try:
        document = None if isinstance(text, Exception) else parse_json(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _root_problem(message: str) -> Problem:
    return Problem(Part.ROOT, ROOT_KEY, None, (), message)


@dataclass(frozen=True, slots=True)
class CheckedIndex:
    """The index: its arrays that could be read, the paths of those that the root promises, and what is wrong."""

    arrays: Mapping[str, np.ndarray]
    sealed: frozenset[str]
    problems: tuple[Problem, ...]


def check_index(storage: Storage, record: StoreRecord) -> CheckedIndex:
    """Read every index array that a store of this phase has, and check its checksums and the range of its values."""
    specs = {} if record.phase == "tokens" else record.schema.token_index()
    specs |= record.schema.final_index() if record.complete else {}
    arrays: dict[str, np.ndarray] = {}
    sealed: set[str] = set()
    problems: list[Problem] = []
    for path, spec in specs.items():
        (key,) = array_keys(path, spec)
        try:
            stored = storage.read(key, object_limit(spec))
            arrays[path] = unpack_array(stored, spec.data_type, spec.shape, key)
        except (OSError, DamagedStoreError) as error:
            problems.append(Problem(Part.INDEX, key, None, (), describe_error(error, key)))
            continue
        if hashlib.blake2b(stored, digest_size=DIGEST_BYTES).hexdigest() == record.checksums.get(path):
            sealed.add(path)
        else:
            problems.append(Problem(Part.INDEX, key, None, (), _NOT_SEALED))
    problems += _check_ranges(record.schema, specs, arrays)
    return CheckedIndex(arrays, frozenset(sealed), tuple(problems))


def _check_ranges(
    schema: StoreSchema, specs: Mapping[str, ArraySpec], arrays: Mapping[str, np.ndarray]
) -> Iterator[Problem]:
    lengths = arrays.get(INDEX_LENGTH)
    limits: dict[str, int | np.ndarray] = {
        INDEX_LENGTH: schema.seq_length,
        INDEX_SUPERVISED: schema.seq_length if lengths is None else lengths,
        INDEX_SOURCE: len(schema.sources) - 1,
        INDEX_STATUS: 1,
    }
    for path, most in limits.items():
        if (values := arrays.get(path)) is None:
            continue
        outside = np.flatnonzero((values < 0) | (values > most))
        if outside.size:
            (key,) = array_keys(path, specs[path])
            first = int(outside[0])
            message = f"holds {values[first]} for sample {first}, which is out of range"
            yield Problem(Part.INDEX, key, None, tuple(outside.tolist()), message)


def check_weights(storage: Storage, record: StoreRecord) -> list[Problem]:
    """Check the target's tables, object by object and each table as a whole."""
    problems: list[Problem] = []
    for path, shape in record.weights.items():
        spec = record.schema.weights(shape)
        state = hashlib.blake2b(digest_size=DIGEST_BYTES)
        damaged = []
        for key in array_keys(path, spec):
            try:
                stored = storage.read(key, object_limit(spec))
                if crc32c(stored[:-4]) != int.from_bytes(stored[-4:], "little") or len(stored) < 4:
                    raise DamagedStoreError("fails its checksum")
                state.update(stored)
            except (OSError, DamagedStoreError) as error:
                damaged.append(Problem(Part.WEIGHTS, key, None, (), describe_error(error, key)))
        if not damaged and state.hexdigest() != record.checksums.get(path):
            damaged.append(Problem(Part.WEIGHTS, array_keys(path, spec)[0], None, (), _NOT_SEALED))
        problems += damaged
    return problems


def check_promises(problems: list[Problem]) -> Iterator[Problem]:
    """Yield a problem of the root when many arrays are whole and none of them the one that it promises.

    Two may have been swapped; of more it is likelier that the root is not theirs.
    """
    unpromised = [problem.key for problem in problems if problem.message == _NOT_SEALED]
    if len(unpromised) >= _SUSPICIOUS:
        message = f"promises other bytes than {len(unpromised)} arrays have that are whole: it is of another run"
        yield Problem(Part.ROOT, ROOT_KEY, None, (), message)
