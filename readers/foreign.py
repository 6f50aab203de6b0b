"""Columns whose ``zarr.json`` no preset writes: another codec chain or chunking. zarr-python reads them.

There is no ledger for them, so their metadata and their headers are not believed: shape and dtype must be those of the
layout, codecs must be known ones, and each is decoded here, into no more bytes than a chunk has.
"""

from __future__ import annotations

import asyncio
import errno
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import numpy as np
import zarr
from numcodecs import blosc, lz4, zstd
from zarr.abc.codec import BytesBytesCodec, Codec
from zarr.abc.store import ByteRequest
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec, TransposeCodec
from zarr.codecs.numcodecs import PCodec
from zarr.core.array import AsyncArray
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, BufferPrototype, NDBuffer
from zarr.core.metadata.v3 import ArrayV3Metadata
from zarr.storage import LocalStore, StorePath

from dspark_store.format.codecs import Pcodec, check_blosc, refuse_inflated
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.files import LocalObject
from dspark_store.format.jsonvalue import JsonFields, JsonValue, parse_json, shown
from dspark_store.format.metadata import node_key
from dspark_store.format.schema import IDS, LAYERS, MASK, MOST_CHUNK_BYTES, MOST_CHUNKS, StoreSchema
from dspark_store.format.storage import LocalStorage, Storage
from dspark_store.readers.threads import ForkSafeLock

type _Decode = Callable[[bytes, int], bytes]


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
        self._storage = storage
        self._column = column
        self._schema = schema
        self._lock = ForkSafeLock()
        self._array: zarr.Array[Any] | None = None

    def fetch(self, sample: int, slot: int, start: int, stop: int, out: np.ndarray) -> None:
        """Fill ``out`` with the positions [start, stop) of a sample.

        DamagedStoreError when the column is not one of the layout or cannot be decoded, OSError when the file system
        cannot read it.
        """
        width = self._schema.hidden_size
        features = slice(slot * width, (slot + 1) * width) if self._column == LAYERS else slice(0, width)
        chosen: tuple[slice, ...] = (slice(sample, sample + 1), slice(start, stop))
        try:
            with self._lock.held:
                if self._array is None:
                    self._array = self._open()
            chosen = chosen if self._column in (IDS, MASK) else (*chosen, features)
            self._check_objects(self._array, chosen)
            values = np.asarray(self._array[chosen])[0]
        except DamagedStoreError:
            raise
        except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError, MemoryError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
                raise  # the file system's; a codec's, on bytes it cannot read, has no number
            raise DamagedStoreError(f"zarr-python cannot read it: {error}") from error
        out[...] = values.view(out.dtype)

    def _open(self) -> zarr.Array[Any]:
        key = node_key(self._column)
        try:
            fields = JsonFields.of(parse_json(self._storage.read(key)), key)
            metadata = _parse_metadata(fields, self._column, self._schema)
        except DamagedStoreError:
            raise
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise DamagedStoreError(f"{key} describes no column that can be read: {error}") from error
        place = StorePath(_RegularFiles(self._storage.path(self._column), read_only=True))
        return zarr.Array(AsyncArray(metadata, place, {"read_missing_chunks": False}))

    def _check_objects(self, array: zarr.Array[Any], chosen: Sequence[slice]) -> None:
        """Open what zarr-python will read: it must be a file, and large enough for what becomes of it."""
        metadata = cast(ArrayV3Metadata, array.metadata)
        outer = array.shards or array.chunks
        sharded = array.shards is not None
        numbers = [range(part.start // size, -(-part.stop // size)) for part, size in zip(chosen, outer, strict=True)]
        raw = math.prod(outer) * array.dtype.itemsize
        for place in product(*numbers):
            reader = self._storage.open(f"{self._column}/{metadata.encode_chunk_key(place)}")
            reader.close()
            if not sharded:
                refuse_inflated(raw, reader.size)
                if reader.size > _most_bytes(raw):
                    raise DamagedStoreError(f"object of {reader.size:,} bytes is too large for a chunk of {raw:,}")


def _parse_metadata(fields: JsonFields, column: str, schema: StoreSchema) -> ArrayV3Metadata:
    """Check a column's metadata against the layout; DamagedStoreError, or what zarr-python raises, when it is wrong."""
    spec = schema.columns()[column]
    for name, expected in (("shape", list(spec.shape)), ("data_type", spec.data_type), ("node_type", "array")):
        if fields.fields.get(name) != expected:
            raise DamagedStoreError(f"{fields.where}: {name} is {shown(fields.fields.get(name))}, expected {expected}")
    grid = JsonFields(fields.table("chunk_grid"), fields.where)
    chunk = JsonFields(grid.table("configuration"), fields.where).counts("chunk_shape", 1)
    if grid.text("name") != "regular" or len(chunk) != len(spec.shape) or fields.fields.get("storage_transformers"):
        raise DamagedStoreError(f"{fields.where}: a column has a regular grid of chunks with {len(spec.shape)} axes")
    codecs = list(_codecs(fields, chunk, np.dtype(spec.data_type).itemsize))
    document = {**fields.fields, "fill_value": spec.fill_value, "codecs": codecs}
    return ArrayV3Metadata.from_dict(cast("dict[str, Any]", document))


def _codecs(fields: JsonFields, chunk: Sequence[int], itemsize: int, *, inner: bool = False) -> Iterator[Codec]:
    """Yield the codecs of a chain, each one that takes no more memory than the chunk it gives."""
    items = [JsonFields.of(item, f"{fields.where}: a codec") for item in fields.items("codecs")]
    names = [item.text("name") for item in items]
    if "sharding_indexed" not in names and math.prod(chunk) * itemsize > MOST_CHUNK_BYTES:
        raise DamagedStoreError(f"{fields.where}: a chunk of {math.prod(chunk) * itemsize:,} bytes is too large")
    for name, item in zip(names, items, strict=True):
        configuration = item.table("configuration") if item.has("configuration") else {}
        if name == "sharding_indexed" and not inner and len(names) == 1:
            yield _sharding(JsonFields(configuration, f"{fields.where}: {name}"), chunk, itemsize)
        elif name in _DECODERS:
            yield _Bounded(name, configuration)
        elif name in _PLAIN:
            yield _PLAIN[name].from_dict({"name": name, "configuration": dict(configuration)})
        else:
            known = ", ".join([*_PLAIN, *_DECODERS, "sharding_indexed"])
            raise DamagedStoreError(f"{fields.where}: codec {shown(name)} is none that is read here: {known}")


def _sharding(fields: JsonFields, shard: Sequence[int], itemsize: int) -> ShardingCodec:
    chunk = fields.counts("chunk_shape", 1)
    index = [JsonFields.of(item, fields.where).text("name") for item in fields.items("index_codecs")]
    if index not in (["bytes"], ["bytes", "crc32c"]) or len(chunk) != len(shard):
        raise DamagedStoreError(f"{fields.where}: no index or chunk of a shard that is read here")
    if math.prod(-(-size // part) for size, part in zip(shard, chunk, strict=True)) > MOST_CHUNKS:
        raise DamagedStoreError(f"{fields.where}: a shard has at most {MOST_CHUNKS:,} chunks")
    return ShardingCodec(
        chunk_shape=chunk,
        codecs=list(_codecs(fields, chunk, itemsize, inner=True)),
        index_codecs=cast(Any, list(fields.items("index_codecs"))),
        index_location=cast(Any, fields.text("index_location") if fields.has("index_location") else "end"),
    )


def _most_bytes(raw: int) -> int:
    """Return the most bytes that a chunk of ``raw`` bytes has in any form on the way to its object."""
    return raw + raw // 8 + 65536


@dataclass(frozen=True)
class _Bounded(BytesBytesCodec):
    """A compressor that gives no more bytes than the chunk has, whatever its header says."""

    name: str
    configuration: Mapping[str, JsonValue]
    is_fixed_size = False

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "configuration": dict(self.configuration)}

    def _decode_sync(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        raw = math.prod(chunk_spec.shape) * _itemsize(chunk_spec)
        stored = chunk_bytes.to_bytes()
        refuse_inflated(raw, len(stored))
        decoded = _DECODERS[self.name](stored, _most_bytes(raw))
        return chunk_spec.prototype.buffer.from_bytes(decoded)

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> Buffer:
        return await asyncio.to_thread(self._decode_sync, chunk_data, chunk_spec)

    def compute_encoded_size(self, _input_byte_length: int, _chunk_spec: ArraySpec) -> int:
        raise NotImplementedError


@dataclass(frozen=True)
class _BoundedPcodec(PCodec):
    """pcodec into an array of the chunk's shape; its own header may name another."""

    def _decode_sync(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        out = np.empty(chunk_spec.shape, chunk_spec.dtype.to_native_dtype())
        stored = chunk_data.to_bytes()
        refuse_inflated(out.nbytes, len(stored))
        Pcodec(out.itemsize).decompress(memoryview(stored), out)
        return chunk_spec.prototype.nd_buffer.from_ndarray_like(out)


def _itemsize(spec: ArraySpec) -> int:
    return spec.dtype.to_native_dtype().itemsize


def _inflate(window: int) -> _Decode:
    def decode(stored: bytes, most: int) -> bytes:
        parts: list[bytes] = []
        while stored:  # gzip may have several members
            stream = zlib.decompressobj(window)
            try:
                parts.append(stream.decompress(stored, most + 1))
            except zlib.error as error:
                raise ValueError(str(error)) from error
            most -= len(parts[-1])
            if most < 0:
                raise DamagedStoreError("compressed chunk becomes larger than a chunk is")
            if not stream.eof:
                raise DamagedStoreError("compressed chunk ends early")
            stored = stream.unused_data
        return b"".join(parts)

    return decode


def _blosc(stored: bytes, most: int) -> bytes:
    check_blosc(memoryview(stored), most=most)
    return bytes(blosc.decompress(stored))


def _lz4(stored: bytes, most: int) -> bytes:
    _refuse_larger(int.from_bytes(stored[:4], "little"), most)
    return bytes(lz4.decompress(stored))


def _zstd(stored: bytes, most: int) -> bytes:
    """RFC 8878, section 3.1.1.1: a frame says its content's size, if its writer knew it."""
    flags = stored[4] if len(stored) > 4 else 0
    single, wide, dictionary = flags >> 5 & 1, flags >> 6, (0, 1, 2, 4)[flags & 3]
    begin, length = 6 - single + dictionary, (single, 2, 4, 8)[wide]
    field = stored[begin : begin + length]
    if stored[:4] != b"\x28\xb5\x2f\xfd" or not length or len(field) < length:
        raise DamagedStoreError("zstd frame does not say how large its content is")
    _refuse_larger(int.from_bytes(field, "little") + 256 * (wide == 1), most)
    return bytes(zstd.decompress(stored))


def _refuse_larger(size: int, most: int) -> None:
    if size > most:
        raise DamagedStoreError(f"compressed chunk says that it becomes {size:,} bytes, more than a chunk is")


_PLAIN: dict[str, type[Any]] = {
    "bytes": BytesCodec,
    "transpose": TransposeCodec,
    "crc32c": Crc32cCodec,
    "numcodecs.pcodec": _BoundedPcodec,
}
_DECODERS: dict[str, _Decode] = {
    "blosc": _blosc,
    "gzip": _inflate(31),
    "zstd": _zstd,
    "numcodecs.blosc": _blosc,
    "numcodecs.gzip": _inflate(31),
    "numcodecs.lz4": _lz4,
    "numcodecs.zlib": _inflate(15),
    "numcodecs.zstd": _zstd,
}
