"""Opening a stored object as what it ought to be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspark_store.format.codecs import CodecChain
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.shard import ObjectRecord, ObjectTail, Place, read_tail
from dspark_store.format.storage import ObjectReader, Storage


@dataclass(frozen=True, slots=True)
class Expected:
    """What must stand at a key: the store, the place, and, where they are known, the ledger's row and the tokens."""

    store_id: str
    place: Place
    record: ObjectRecord | None = None
    tokens: str | None = None

    def check(self, tail: ObjectTail) -> None:
        """Raise DamagedStoreError unless ``tail`` belongs to the expected object."""
        label = tail.label
        if label.store_id != self.store_id:
            raise DamagedStoreError(f"belongs to another store ({label.store_id}, expected {self.store_id})")
        if not any(self.place.accepts(place) for place in label.places):
            raise DamagedStoreError(f"belongs to {label.places}, not to {self.place}")
        if self.tokens is not None and label.tokens != self.tokens:
            raise DamagedStoreError("was computed from other tokens than the store holds")
        if self.record is not None and self.record != tail.record:
            raise DamagedStoreError(f"is not the one in the ledger: {tail.record}, expected {self.record}")


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An open object whose tail was checked."""

    key: str
    reader: ObjectReader
    tail: ObjectTail

    def decode(self, slot: int, chain: CodecChain, out: np.ndarray) -> None:
        """Decode the chunk of a slot into ``out``; DamagedStoreError naming the object when it is absent or altered."""
        size = int(self.tail.sizes[slot])
        if size == 0:
            raise DamagedStoreError(f"object {self.key} lacks the chunk in slot {slot}")
        stored = memoryview(self.reader.read(int(self.tail.offsets[slot]), size))
        try:
            if len(stored) != size:
                raise DamagedStoreError(f"chunk has {len(stored)} of {size} bytes")
            chain.decode(stored, out, crc=int(self.tail.crcs[slot]))
        except DamagedStoreError as error:
            raise DamagedStoreError(f"object {self.key}, slot {slot}: {error}") from error


def open_object(storage: Storage, key: str, slots: int, expected: Expected) -> StoredObject:
    """Open an object and check its tail; DamagedStoreError naming the key when it is missing or wrong."""
    try:
        reader = storage.open(key)
    except FileNotFoundError as error:
        raise DamagedStoreError(f"object {key} is missing from {storage}") from error
    try:
        tail = read_tail(reader, slots)
        expected.check(tail)
    except DamagedStoreError as error:
        reader.close()
        raise DamagedStoreError(f"object {key} {error}") from error
    return StoredObject(key, reader, tail)
