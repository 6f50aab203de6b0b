"""One stored object: chunks, trailer, shard index.

To Zarr an object is a shard of the ``sharding_indexed`` codec with its index at the end; the bytes between the last
chunk and the index are free, and the trailer stands there. It says what the object is (the store, its places, the
tokens it was computed from) and promises every chunk's checksum, so that one read of an object's tail proves place,
identity, tokens and content. The layout is specified in docs/format.md.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
from crc32c import crc32c

from dspark_store.format.codecs import CRC_BYTES, EncodedChunk
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.grid import ShardGrid
from dspark_store.format.jsonvalue import JsonFields, JsonValue, canonical_json, parse_json
from dspark_store.format.storage import ObjectReader, ObjectWriter

TRAILER_VERSION = 1
_MAGIC = b"DSPKTRLR"
_ABSENT = np.uint64(2**64 - 1)
_TAIL_GUESS = 2048
_MALFORMED = "trailer header is malformed"
_FIXED_BYTES = 2 * len(_MAGIC) + 8
_HEADER_BYTES, _HEADER_BYTES_PER_SLOT = 64 * 1024, 24
"""The longest header: two places, and each row, of which there are no more than slots, as one that is not finite."""
LEAST_LAYER = -1
"""The id of the embedding output; that of the last layer is the target's depth less one."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an object belongs: a column, its slot on the layer axis, and a shard.

    ``layer_id`` is the captured layer in that slot; None where a column has no layers or no manifest had named them.
    """

    column: str
    slot: int
    layer_id: int | None
    shard: int

    def accepts(self, other: Place) -> bool:
        """Whether ``other``, read from a trailer, is this place."""
        here, there = (self.column, self.slot, self.shard), (other.column, other.slot, other.shard)
        return here == there and (other.layer_id is None or self.layer_id in (None, other.layer_id))


@dataclass(frozen=True, slots=True)
class ObjectLabel:
    """What the trailer says of an object beside its checksums.

    ``store_id`` is the store's digest of identity; ``places`` one place, or two for a shared object; ``rows`` the
    samples in the shard; ``tokens`` the digest of the tokens that the states were computed from; ``nonfinite`` the
    rows of the shard whose values are not all finite; ``widened`` how many tokens' codes have a widened step, None
    where there are no codes, or it is not known.
    """

    store_id: str
    places: tuple[Place, ...]
    rows: int
    tokens: str
    nonfinite: tuple[int, ...] = ()
    widened: int | None = None

    def header(self) -> bytes:
        """Return the trailer's header: canonical JSON."""
        places: list[JsonValue] = [
            {"column": place.column, "slot": place.slot, "layer_id": place.layer_id, "shard": place.shard}
            for place in self.places
        ]
        return canonical_json(
            {
                "version": TRAILER_VERSION,
                "store": self.store_id,
                "places": places,
                "rows": self.rows,
                "tokens": self.tokens,
                "nonfinite": list(self.nonfinite),
                **({} if self.widened is None else {"widened": self.widened}),
            }
        )


def parse_label(header: bytes) -> ObjectLabel:
    """Read a trailer's header back; DamagedStoreError when it is not one."""
    try:
        fields = JsonFields.of(parse_json(header), _MALFORMED)
    except ValueError as error:
        raise DamagedStoreError(
            str(error) if isinstance(error, DamagedStoreError) else f"{_MALFORMED}: {error}"
        ) from error
    if (version := fields.count("version")) != TRAILER_VERSION:
        raise DamagedStoreError(f"trailer version {version} is unknown, expected {TRAILER_VERSION}")
    places = tuple(_parse_place(JsonFields.of(place, _MALFORMED)) for place in fields.items("places"))
    rows = fields.count("rows")
    nonfinite = fields.counts("nonfinite", most=rows - 1)
    widened = fields.count("widened") if fields.has("widened") else None
    return ObjectLabel(fields.text("store"), places, rows, fields.text("tokens"), nonfinite, widened)


def _parse_place(fields: JsonFields) -> Place:
    layer_id = None if fields.is_null("layer_id") else fields.count("layer_id", LEAST_LAYER)
    return Place(fields.text("column"), fields.count("slot"), layer_id, fields.count("shard"))


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    """A ledger row: the object's size in bytes, and the 64-bit digest over its trailer and index."""

    nbytes: int
    digest: int


class ShardWriter:
    """Writes one object as its chunks come. Memory does not grow with the shard's data, only with its index."""

    def __init__(self, out: ObjectWriter, slots: int) -> None:
        self._out = out
        self._index = np.full((slots, 2), _ABSENT, "<u8")
        self._crcs = np.zeros(slots, "<u4")
        self._offset = 0

    def append(self, slot: int, *chunks: EncodedChunk) -> None:
        """Append the chunks of the slots from ``slot`` on; every slot at most once."""
        for written, chunk in enumerate(chunks, slot):
            if self._index[written, 0] != _ABSENT:
                raise ValueError(f"slot {written} was written already")
            self._index[written] = (self._offset, chunk.nbytes)
            self._crcs[written] = chunk.crc
            self._offset += chunk.nbytes
        self._out.write(*(part for chunk in chunks for part in (chunk.payload, chunk.crc_bytes())))

    def finish(self, label: ObjectLabel) -> ObjectRecord:
        """Append trailer and index and commit the object: fsync, rename, fsync of the directory."""
        record = self.sync(label)
        self.publish()
        return record

    def sync(self, label: ObjectLabel) -> ObjectRecord:
        """Append trailer and index and make the object durable. It is not visible yet."""
        header = label.header()
        length = _trailer_bytes(header, len(self._crcs))
        trailer = (_MAGIC, struct.pack("<I", len(header)), header, self._crcs, struct.pack("<I", length), _MAGIC)
        tail = b"".join((*trailer, self._index, struct.pack("<I", crc32c(self._index))))  # copied once: it may be large
        self._out.write(tail)
        self._out.finish()
        return ObjectRecord(self._offset + len(tail), _digest(tail))

    def publish(self) -> None:
        """Make the durable object visible: rename, fsync of the directory."""
        self._out.commit()

    def abort(self) -> None:
        """Drop the object."""
        self._out.abort()


@dataclass(frozen=True, slots=True)
class ObjectTail:
    """An object's index and trailer, checked against each other.

    ``bounds`` tell where the chunks of each row lie, see `chunk_bounds`; ``crcs`` (rows, chunks) uint32 are the
    checksums that the trailer promises. Together they take 8 to 12 bytes per chunk in objects below 4 GiB.
    """

    bounds: np.ndarray
    crcs: np.ndarray
    label: ObjectLabel
    record: ObjectRecord

    @property
    def nbytes(self) -> int:
        """The memory that index and checksums take."""
        return self.bounds.nbytes + self.crcs.nbytes

    @property
    def present(self) -> np.ndarray:
        """(slots,) bool: which chunks are stored."""
        return self.bounds[:, 1:].ravel() > 0


def read_tail(reader: ObjectReader, grid: ShardGrid) -> ObjectTail:
    """Read and check an object's trailer and index; DamagedStoreError when they are not whole.

    Every range of the tail that is returned lies inside of the object's data, and no two overlap; the chunks of a row
    stand side by side and in order.
    """
    slots = grid.slots
    index_bytes = 16 * slots + 4
    least = _FIXED_BYTES + 4 * slots
    if reader.size < least + index_bytes:
        raise DamagedStoreError(f"object of {reader.size} bytes is too short for its index of {slots} chunks")
    want = min(reader.size, index_bytes + least + _TAIL_GUESS)
    tail = _read(reader, want)
    end = len(tail) - index_bytes
    if tail[end - len(_MAGIC) : end] != _MAGIC:
        raise DamagedStoreError("trailer is missing before the shard index")
    (length,) = struct.unpack_from("<I", tail, end - len(_MAGIC) - 4)
    if not least <= length <= min(reader.size - index_bytes, least + _HEADER_BYTES + _HEADER_BYTES_PER_SLOT * slots):
        raise DamagedStoreError(f"trailer of an object of {reader.size} bytes cannot have {length}")
    if length > end:
        tail = _read(reader, index_bytes + length)
    return _parse_tail(tail[len(tail) - index_bytes - length :], grid, reader.size, length)


def _read(reader: ObjectReader, count: int) -> bytes:
    """Read the last bytes of an object."""
    tail = reader.read(reader.size - count, count)
    if len(tail) != count:
        raise DamagedStoreError(f"object ends {count - len(tail)} bytes early")
    return tail


def _parse_tail(tail: bytes, grid: ShardGrid, size: int, length: int) -> ObjectTail:
    slots = grid.slots
    index_bytes, (stored_crc,) = tail[length:-4], struct.unpack_from("<I", tail, len(tail) - 4)
    if crc32c(index_bytes) != stored_crc:
        raise DamagedStoreError("shard index checksum is wrong")
    (header_length,) = struct.unpack_from("<I", tail, len(_MAGIC))
    if tail[: len(_MAGIC)] != _MAGIC or length != _FIXED_BYTES + header_length + 4 * slots:
        raise DamagedStoreError("trailer is malformed")
    header_end = len(_MAGIC) + 4 + header_length
    index = np.frombuffer(index_bytes, "<u8").reshape(slots, 2)
    absent = index[:, 0] == _ABSENT
    if bool((index[absent, 1] != _ABSENT).any()) or not _covers(index[~absent], size - len(tail)):
        raise DamagedStoreError("shard index does not cover the object's data")
    offsets, sizes = np.where(absent[:, None], np.uint64(0), index).T
    return ObjectTail(
        bounds=chunk_bounds(offsets, sizes, grid.chunks_per_row),
        crcs=np.frombuffer(tail, "<u4", slots, header_end).copy().reshape(-1, grid.chunks_per_row),
        label=parse_label(tail[len(_MAGIC) + 4 : header_end]),
        record=ObjectRecord(size, _digest(tail)),
    )


def _covers(ranges: np.ndarray, data_bytes: int) -> bool:
    """Tell whether ranges, (n, 2) offsets and sizes, are chunks that stand one behind the other in all of the data.

    Nothing is added before it is known to be small: sums of such numbers wrap.
    """
    if bool((ranges > data_bytes).any()) or bool((ranges[:, 1] < CRC_BYTES).any()):
        return False
    offsets, sizes = ranges[:, 0], ranges[:, 1]
    if bool((offsets[1:] < offsets[:-1]).any()):
        order = np.argsort(offsets, kind="stable")
        offsets, sizes = offsets[order], sizes[order]
    # as differences, which do not wrap here: each chunk begins where the one before it ends
    begins = np.append(offsets, np.uint64(data_bytes))
    return int(begins[0]) == 0 and bool((np.diff(begins) == sizes).all())


def chunk_bounds(offsets: np.ndarray, sizes: np.ndarray, chunks_per_row: int) -> np.ndarray:
    """Return where the chunks of each row lie in an object: (rows, chunks_per_row + 1) of the smallest unsigned dtype.

    Chunk i of a row is the bytes from entry i to entry i + 1; entries past the end of its last chunk are 0. ``offsets``
    and ``sizes`` are the object's index, (slots,), size 0 where a chunk is absent. DamagedStoreError when the chunks of
    a row do not stand side by side and in order, as the format has them: then no single range holds them.
    """
    offsets, sizes = (values.reshape(-1, chunks_per_row) for values in (offsets, sizes))
    present = sizes > 0
    joined = present[:, 1:] <= (present[:, :-1] & (offsets[:, 1:] == (offsets + sizes)[:, :-1]))
    if not joined.all():
        row = int(np.argmin(joined.all(axis=1)))
        raise DamagedStoreError(
            f"does not keep the chunks in slots {row * chunks_per_row} to {(row + 1) * chunks_per_row - 1} together"
        )
    bounds = np.zeros((len(sizes), chunks_per_row + 1), np.uint64)
    bounds[:, :-1] = np.where(present, offsets, 0)
    bounds[:, 1:] = np.where(present, offsets + sizes, 0)
    return bounds.astype(np.min_scalar_type(bounds.max(initial=0)))


def _trailer_bytes(header: bytes, slots: int) -> int:
    return _FIXED_BYTES + len(header) + 4 * slots


def _digest(tail: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(tail, digest_size=8).digest(), "little")
