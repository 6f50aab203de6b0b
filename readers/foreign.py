"""Columns whose ``zarr.json`` no preset writes: another codec chain or chunking. zarr-python reads them."""

from __future__ import annotations

import asyncio
import errno
from contextlib import closing, suppress
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import ByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import LocalStore

from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.schema import IDS, LAYERS, MASK, StoreSchema
from dspark_store.format.storage import LocalObject, LocalStorage, Storage
from dspark_store.readers.forks import ProcessLock


class _RegularFiles(LocalStore):
    """zarr-python's local store, but for what is no regular file: that is refused, where a FIFO would be waited for."""

    def get_sync(
        self, key: str, *, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        with suppress(FileNotFoundError), closing(LocalObject(self.root / key, key)):
            return super().get_sync(key, prototype=prototype, byte_range=byte_range)
        return None

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        return await asyncio.to_thread(self.get_sync, key, prototype=prototype, byte_range=byte_range)


class ForeignColumn:
    """One column read through zarr-python, with the thin reader's results.

    There is no trailer to check; damage shows as far as the column's own codecs detect it.
    """

    def __init__(self, storage: Storage, column: str, schema: StoreSchema) -> None:
        if not isinstance(storage, LocalStorage):
            raise ValueError(f"column {column} has a foreign codec chain, which is read from local stores only")
        self._path = storage.path(column)
        self._column = column
        self._schema = schema
        self._lock = ProcessLock()
        self._array: zarr.Array[Any] | None = None

    def fetch(self, sample: int, slot: int, start: int, stop: int, out: np.ndarray) -> None:
        """Fill ``out`` with the positions [start, stop) of a sample.

        DamagedStoreError when zarr-python cannot decode them, OSError when the file system cannot read them.
        """
        width = self._schema.hidden_size
        features = slice(slot * width, (slot + 1) * width) if self._column == LAYERS else slice(None)
        try:
            with self._lock:
                if self._array is None:
                    store = _RegularFiles(self._path, read_only=True)
                    self._array = zarr.open_array(store, mode="r", config={"read_missing_chunks": False})
            token_column = self._column in (IDS, MASK)
            values = self._array[sample, start:stop] if token_column else self._array[sample, start:stop, features]
        except (ValueError, RuntimeError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
                raise  # the file system's; a codec's, on bytes it cannot read, has no number
            raise DamagedStoreError(f"zarr-python cannot read it: {error}") from error
        out[...] = np.asarray(values).view(out.dtype)
