"""Codec presets: how one chunk becomes bytes and comes back.

A chain is Zarr's own (``bytes`` then maybe ``blosc``, or ``numcodecs.pcodec``), always followed by ``crc32c``, so that
stock readers decode it from ``zarr.json`` alone. blosc's block size is part of the preset: on real states the
automatic one stores 0.66-0.68 of ragged bf16 rows of 6 vectors at half the decode speed, where 512 KiB stores
0.57-0.60.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Buffer
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from crc32c import crc32c
from numcodecs import blosc

from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.jsonvalue import JsonValue

CRC_BYTES = 4
CODEC_PRESETS = ("none", "fast", "default", "dense")
_BLOCKSIZE = 512 * 1024
_PAGE, _LEAST_FILL = 2**18, 64  # values
_ANY_CHUNK_BYTES, _MOST_INFLATED = 64 * 1024 * 1024, 256
_CRC: dict[str, JsonValue] = {"name": "crc32c"}


def refuse_inflated(decoded: int, stored: int) -> None:
    """Raise DamagedStoreError for a chunk that would become large, and by far more than any real one does.

    So the memory that decoding takes is borne out by the bytes that are stored.
    """
    if decoded > _ANY_CHUNK_BYTES and decoded > _MOST_INFLATED * stored:
        raise DamagedStoreError(f"chunk of {stored:,} bytes would become {decoded:,}: more than {_MOST_INFLATED}-fold")


def check_blosc(payload: memoryview, most: int) -> int:
    """Check a blosc header, which blosc takes at its word, and return the bytes that its content has.

    ValueError unless they are ``most`` at most, in blocks no larger, and the header says how long the payload is.
    """
    size, block, stored = (int.from_bytes(payload[place : place + 4], "little") for place in (4, 8, 12))
    if size > most or stored != len(payload):
        raise ValueError(f"header says {size} bytes in {stored}, expected {most} in {len(payload)}")
    if block > size:
        raise ValueError(f"header says blocks of {block} bytes in {size}")
    return size


class Compressor(Protocol):
    """The part of a chain between an array and its checksum."""

    def metadata(self) -> list[JsonValue]:
        """Return the entries of ``codecs`` in ``zarr.json`` that come before ``crc32c``."""
        ...

    def compress(self, chunk: np.ndarray) -> bytes | memoryview:
        """Encode a C-contiguous array."""
        ...

    def decompress(self, payload: memoryview, out: np.ndarray) -> None:
        """Decode into ``out``, a C-contiguous array of the chunk's size."""
        ...


def _bytes_codec(itemsize: int) -> dict[str, JsonValue]:
    return {"name": "bytes"} if itemsize == 1 else {"name": "bytes", "configuration": {"endian": "little"}}


@dataclass(frozen=True, slots=True)
class Plain:
    """No compression: the array's little-endian bytes."""

    itemsize: int

    def metadata(self) -> list[JsonValue]:
        """See `Compressor`."""
        return [_bytes_codec(self.itemsize)]

    def compress(self, chunk: np.ndarray) -> memoryview:
        """See `Compressor`; a view, not a copy."""
        return memoryview(chunk.reshape(-1).view(np.uint8))

    def decompress(self, payload: memoryview, out: np.ndarray) -> None:
        """See `Compressor`."""
        flat = out.reshape(-1).view(np.uint8)
        if len(payload) != flat.size:
            raise ValueError(f"chunk has {len(payload)} bytes, expected {flat.size}")
        flat[:] = np.frombuffer(payload, np.uint8)


@dataclass(frozen=True, slots=True)
class Blosc:
    """blosc with an explicit block size.

    On the main thread numcodecs compresses with blosc's own threads, which append blocks in the order in which they
    finish; off it with one thread. Equal arrays must give equal bytes, so the main thread hands its chunks to another.
    """

    itemsize: int
    cname: str
    shuffle: str

    def metadata(self) -> list[JsonValue]:
        """See `Compressor`."""
        configuration: dict[str, JsonValue] = {
            "typesize": self.itemsize,
            "cname": self.cname,
            "clevel": 1,
            "shuffle": self.shuffle,
            "blocksize": _BLOCKSIZE,
        }
        return [_bytes_codec(self.itemsize), {"name": "blosc", "configuration": configuration}]

    def compress(self, chunk: np.ndarray) -> bytes:
        """See `Compressor`."""
        if chunk.nbytes > _BLOCKSIZE and threading.current_thread() is threading.main_thread():
            with ThreadPoolExecutor(1, "blosc") as thread:
                return thread.submit(self._compress, chunk).result()
        return self._compress(chunk)

    def _compress(self, chunk: np.ndarray) -> bytes:
        mode = {"noshuffle": blosc.NOSHUFFLE, "shuffle": blosc.SHUFFLE, "bitshuffle": blosc.BITSHUFFLE}[self.shuffle]
        encoded: bytes = blosc.compress(chunk, self.cname.encode(), 1, mode, _BLOCKSIZE)
        return encoded

    def decompress(self, payload: memoryview, out: np.ndarray) -> None:
        """See `Compressor`; the header's sizes are checked here, because blosc takes them at their word."""
        size = check_blosc(payload, most=out.nbytes)
        if size != out.nbytes:
            raise ValueError(f"header says {size} bytes in {len(payload)}, expected {out.nbytes} in {len(payload)}")
        blosc.decompress(payload, out)


@dataclass(frozen=True, slots=True)
class Pcodec:
    """pcodec at level 8: the densest, slow to encode; the optional package ``pcodec``.

    Its pages each have statistics of their own. The fill of a sample's last chunk gets its own ones, since among the
    valid values it would cost a bit per value of both.
    """

    itemsize: int

    def __post_init__(self) -> None:
        if importlib.util.find_spec("pcodec") is None:
            raise ImportError("codec 'dense' needs the package pcodec: pip install 'dspark-store[dense]'")

    def metadata(self) -> list[JsonValue]:
        """See `Compressor`; the codec takes the array itself, so there is no ``bytes`` entry."""
        return [{"name": "numcodecs.pcodec", "configuration": {"level": 8}}]

    def compress(self, chunk: np.ndarray) -> bytes:
        """See `Compressor`; a chunk without fill has the bytes that numcodecs' codec gives."""
        from pcodec import ChunkConfig, PagingSpec, standalone

        values = chunk.reshape(-1)
        filled = _equal_at_end(values.view(f"<u{self.itemsize}"))
        pages = PagingSpec.equal_pages_up_to(_PAGE)
        if _LEAST_FILL <= filled < values.size:
            pages = PagingSpec.exact_page_sizes([*_equal_pages(values.size - filled), *_equal_pages(filled)])
        return bytes(standalone.simple_compress(values, ChunkConfig(compression_level=8, paging_spec=pages)))

    def decompress(self, payload: memoryview, out: np.ndarray) -> None:
        """See `Compressor`."""
        from pcodec import standalone

        # numcodecs drops the count, without which a shorter chunk would leave the rest of `out` as it was
        done = standalone.simple_decompress_into(bytes(payload), out.reshape(-1))
        if done.n_processed != out.size or not done.finished:
            raise ValueError(f"chunk holds {done.n_processed} values, expected {out.size}")


def _equal_at_end(bits: np.ndarray) -> int:
    """Return how many equal values a flat array ends with."""
    other = np.flatnonzero(bits != bits[-1:])
    return len(bits) - int(other[-1]) - 1 if len(other) else len(bits)


def _equal_pages(values: int) -> list[int]:
    count = -(-values // _PAGE)
    return [values // count + (page < values % count) for page in range(count)]


@dataclass(frozen=True, slots=True)
class CodecChain:
    """One array's inner chain: a compressor, then crc32c."""

    compressor: Compressor

    def metadata(self) -> list[JsonValue]:
        """Return the inner ``codecs`` of ``zarr.json``."""
        return [*self.compressor.metadata(), dict(_CRC)]

    def encode(self, chunk: np.ndarray) -> EncodedChunk:
        """Encode one whole chunk, a C-contiguous array of the stored dtype. Runs without the GIL."""
        payload = self.compressor.compress(chunk)
        return EncodedChunk(payload, crc32c(payload))

    def decode(self, stored: memoryview, out: np.ndarray, *, crc: int | None = None) -> None:
        """Decode one stored chunk (payload and checksum) into ``out``.

        With ``crc`` given, the payload's checksum must equal both the stored one and ``crc``, the one that the
        object's trailer promises; DamagedStoreError otherwise.
        """
        payload = stored[:-CRC_BYTES]
        if crc is not None:
            self.check(stored, crc)
        refuse_inflated(out.nbytes, len(payload))
        try:
            self.compressor.decompress(payload, out)
        except (RuntimeError, ValueError, TypeError) as error:
            raise DamagedStoreError(f"chunk does not decode: {error}") from error

    @classmethod
    def check(cls, stored: memoryview, crc: int) -> None:
        """Raise DamagedStoreError unless a stored chunk's checksum is right and is ``crc``."""
        cls.check_split(stored[:-CRC_BYTES], stored[-CRC_BYTES:], crc)

    @staticmethod
    def check_split(payload: Buffer, checksum: Buffer, crc: int) -> None:
        """See `check`; the payload and the stored checksum lie apart."""
        recorded = int.from_bytes(memoryview(checksum), "little")
        actual = crc32c(payload)
        if actual != recorded or actual != crc:
            raise DamagedStoreError(f"chunk checksum is {actual:08x}, stored {recorded:08x}, promised {crc:08x}")


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """One chunk's encoded payload and its crc32c; they are stored one behind the other."""

    payload: bytes | memoryview
    crc: int

    @property
    def nbytes(self) -> int:
        """Bytes in the object, the checksum included."""
        return len(self.payload) + CRC_BYTES

    def crc_bytes(self) -> bytes:
        """Return the checksum as stored."""
        return self.crc.to_bytes(CRC_BYTES, "little")


def state_chain(preset: str, itemsize: int) -> CodecChain:
    """Return a preset's chain for state columns; ValueError for an unknown preset, ImportError without its package."""
    if preset == "none":
        return plain_chain(itemsize)
    if preset == "fast":
        return CodecChain(Blosc(itemsize, "lz4", "bitshuffle"))
    if preset == "default" or (preset == "dense" and itemsize == 1):  # of bytes, nothing is denser
        return CodecChain(Blosc(itemsize, "zstd", "noshuffle" if itemsize == 1 else "shuffle"))
    if preset == "dense":
        return CodecChain(Pcodec(itemsize))
    raise ValueError(f"codec {preset!r} is unknown; choose one of {', '.join(CODEC_PRESETS)}")


def token_chain(preset: str, itemsize: int) -> CodecChain:
    """Return a preset's chain for ids and masks: plain with ``none``, else blosc zstd (small in every preset)."""
    if preset == "none":
        return plain_chain(itemsize)
    return CodecChain(Blosc(itemsize, "zstd", "noshuffle" if itemsize == 1 else "shuffle"))


def plain_chain(itemsize: int) -> CodecChain:
    """Return the chain of the index and the ledger."""
    return CodecChain(Plain(itemsize))
