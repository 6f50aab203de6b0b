"""A store with changes that are not made yet: seen as if they were, and made later, one after the other."""

from __future__ import annotations

import secrets
from collections.abc import Buffer, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dspark_store.format.storage import DOCUMENT_BYTES, LocalStorage, ObjectReader, ObjectWriter


@dataclass(frozen=True, slots=True)
class Change:
    """What an object under ``key`` becomes: ``data``, or the one under ``source`` too; with neither it is removed."""

    key: str
    data: bytes | None = None
    source: str | None = None

    @property
    def removes(self) -> bool:
        """Whether the object is removed."""
        return self.data is None and self.source is None


class _MemoryObject(ObjectReader):
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def version(self) -> None:
        return None

    def read(self, offset: int, length: int) -> bytes:
        return self._data[offset : offset + length]

    def read_into(self, buffer: Buffer, offset: int) -> int:
        view = memoryview(buffer).cast("B")
        part = self.read(offset, len(view))
        view[: len(part)] = part
        return len(part)

    def read_vector(self, buffers: Sequence[Buffer], offset: int) -> int:
        done = 0
        for buffer in buffers:
            done += self.read_into(buffer, offset + done)
        return done

    def close(self) -> None:
        pass


class _MemoryWriter(ObjectWriter):
    """Writes an object that becomes a change."""

    def __init__(self, overlay: Overlay, key: str) -> None:
        self._overlay, self._key = overlay, key
        self._data = b""

    def write(self, *parts: Buffer) -> None:
        self._data += b"".join(part.tobytes() if isinstance(part, np.ndarray) else bytes(part) for part in parts)

    def finish(self) -> None:
        pass

    def commit(self) -> None:
        self._overlay.put(self._key, self._data)

    def abort(self) -> None:
        pass


class Overlay(LocalStorage):
    """A `Storage` over one on disk, which stays as it is until `apply`. What is put must fit into memory."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.changes: list[Change] = []
        self._latest: dict[str, Change] = {}
        self._name = secrets.token_hex(8)

    def __hash__(self) -> int:
        return hash((self.root, self._name, len(self.changes)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Overlay) and (other._name, len(other.changes)) == (self._name, len(self.changes))

    def _add(self, change: Change) -> None:
        self.refuse_links(change.key)
        self.changes.append(change)
        self._latest[change.key] = change

    def _source(self, key: str) -> str | bytes:
        """Return the bytes of an object that was changed, or the key of the one on disk that stands for it."""
        change = self._latest.get(key, Change(key, source=key))
        if change.data is not None:
            return change.data
        if change.source is not None:
            return change.source
        raise FileNotFoundError(f"{self.path(key)} is removed")

    def open(self, key: str) -> ObjectReader:  # type: ignore[override] # an object in memory is no file
        """See `Storage`."""
        source = self._source(key)
        return _MemoryObject(source) if isinstance(source, bytes) else super().open(source)

    def read(self, key: str, limit: int = DOCUMENT_BYTES) -> bytes:
        """See `Storage`."""
        source = self._source(key)
        return source if isinstance(source, bytes) else super().read(source, limit)

    def exists(self, key: str) -> bool:
        """See `Storage`."""
        change = self._latest.get(key)
        return super().exists(key) if change is None else not change.removes

    def list(self, directory: str) -> list[str]:
        """See `Storage`."""
        names = set(super().list(directory))
        for key, change in self._latest.items():
            folder, _, name = key.rpartition("/")
            if folder == directory:
                names = names - {name} if change.removes else names | {name}
        return sorted(names)

    def put(self, key: str, data: bytes) -> None:
        """See `Storage`."""
        self._add(Change(key, data))

    def put_new(self, key: str, data: bytes) -> None:
        """See `Storage`."""
        if self.exists(key):
            raise FileExistsError(f"{self.path(key)} exists")
        self.put(key, data)

    def create(self, key: str) -> _MemoryWriter:  # type: ignore[override] # an object in memory is no file
        """See `Storage`."""
        return _MemoryWriter(self, key)

    def link(self, source: str, key: str) -> None:
        """See `Storage`; ``source`` must be on disk, unchanged."""
        if source in self._latest:
            raise ValueError(f"{source} is changed, and cannot be linked to before it is written")
        self._add(Change(key, source=source))

    def delete(self, key: str) -> None:
        """See `Storage`."""
        if self.exists(key):
            self._add(Change(key))

    def sweep(self) -> int:
        """See `Storage`."""
        leftovers = [path.relative_to(self.root).as_posix() for path in self.temporaries()]
        for key in leftovers:
            self.delete(key)
        return len(leftovers)

    def apply(self, storage: LocalStorage, check: Callable[[], None] = lambda: None) -> None:
        """Make the changes in the order in which they were asked for; ``check`` is called before each."""
        for change in self.changes:
            check()
            if change.data is not None:
                storage.put(change.key, change.data)
            elif change.source is not None:
                storage.link(change.source, change.key)
            else:
                storage.delete(change.key)
                storage.remove_empty_folders(change.key)
