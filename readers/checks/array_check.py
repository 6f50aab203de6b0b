"""The arrays without a ledger row: the index and the target's tables, each against its checksum in the root."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from crc32c import crc32c

from dspark_store.format.arrays import DIGEST_BYTES, array_keys, object_limit, unpack_array
from dspark_store.format.damage import DamagedStoreError, Part, Problem
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.metadata import ROOT_KEY
from dspark_store.format.schema import (
    INDEX_LENGTH,
    INDEX_SOURCE,
    INDEX_STATUS,
    INDEX_SUPERVISED,
    ArraySpec,
    StoreSchema,
)
from dspark_store.format.storage import Storage

_NOT_SEALED = "is whole, but not the one that was sealed"
_SUSPICIOUS = 3


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


def describe_error(error: Exception, key: str) -> str:
    """Return what an error says of an object, without its key."""
    if isinstance(error, FileNotFoundError):
        return "is missing"
    if isinstance(error, OSError) and not isinstance(error, DamagedStoreError):
        return f"cannot be read: {error.strerror or error}"
    return str(error).removeprefix(f"object {key} ")
