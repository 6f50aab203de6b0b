"""Compressed files and others in another form, unpacked once into a temporary file that lives as long as its reader."""

import gzip
import math
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from dspark_store.sources.source import SourceError

LEAST_LIMIT = 1024 * 1024 * 1024
MOST_TIMES = 256  # text becomes 3 to 30 times larger, repeated system prompts and all
_SHARE_OF_DISK = 0.95
GZIP, ZSTD = ".gz", ".zst"
_MAGIC = {b"\x1f\x8b": GZIP, b"\x28\xb5\x2f\xfd": ZSTD}
_BLOCK = 1024 * 1024
_ZSTD_BLOCK = 1024  # at most 32 MiB of contents, 128 KiB of each 4 bytes, which are made in one piece


class Spool:
    """A nameless temporary file (in `TMPDIR`), closed and gone when nothing refers to this any more.

    It takes at most 95% of the disk space that is free, and, of a compressed file, 256 times its size or 1 GiB.
    """

    def __init__(self, path: Path, *, compressed: bool) -> None:
        """Begin it.

        Args:
            path: the file that is written to it in another form, for messages.
            compressed: whether that file is nothing but its compressed text.

        """
        self._path = path
        self._compressed_bytes = path.stat().st_size if compressed else None
        self._free = shutil.disk_usage(tempfile.gettempdir()).free
        self._size = 0
        self.file = cast(BinaryIO, tempfile.TemporaryFile(prefix="dspark-store-"))  # noqa: SIM115 - closed below
        weakref.finalize(self, self.file.close)

    def write(self, data: bytes) -> int:
        """Append data and return how many bytes they are; SourceError if they are too many."""
        self._size += len(data)
        times = math.inf if self._compressed_bytes is None else self._compressed_bytes * MOST_TIMES
        if self._size > max(times, LEAST_LIMIT):
            raise SourceError(
                f"{self._path} has {self._compressed_bytes:,} bytes and unpacks to more than {self._size:,}: it may be "
                "made to fill a disk; if it is not, unpack it and name the unpacked file"
            )
        if self._size > self._free * _SHARE_OF_DISK:
            raise SourceError(
                f"{self._path} needs more than {self._size:,} bytes in {tempfile.gettempdir()}, where {self._free:,} "
                "were free; let TMPDIR name a larger disk"
            )
        return self.file.write(data)


def compression_of(path: Path) -> str | None:
    """Return how a file is compressed, `.gz` or `.zst`, by its first bytes; None if it is not."""
    with path.open("rb") as file:
        head = file.read(4)
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


def unpack(path: Path, compression: str) -> Spool:
    """Return a temporary file with the contents of a compressed one.

    Memory is some blocks of 1 MiB; the disk (`TMPDIR`) must hold the contents.

    Raises:
        SourceError: the file is damaged or ends early, or its contents are too large (see `Spool`).
        ImportError: it is compressed by zstd, and the extra `zstd` is not installed.

    """
    spool = Spool(path, compressed=True)
    for block in _unzstd(path) if compression == ZSTD else _gunzip(path):
        spool.write(block)
    spool.file.seek(0)
    return spool


def _gunzip(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path, "rb") as file:
            while block := file.read(_BLOCK):
                yield block
    except EOFError as error:
        raise SourceError(f"{path}: the gzip stream ends early: the file is cut short") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise SourceError(f"{path}: the gzip stream is damaged ({error})") from error


def _unzstd(path: Path) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise ImportError(
            f"{path} is compressed by zstd; reading it needs the package zstandard: pip install 'dspark-store[zstd]'"
        ) from error
    frame = zstandard.ZstdDecompressor().decompressobj()
    finished = False
    with path.open("rb") as file:
        try:
            while data := file.read(_ZSTD_BLOCK):
                while data:  # a file may hold several frames
                    if finished:
                        frame = zstandard.ZstdDecompressor().decompressobj()
                    yield frame.decompress(data)
                    finished = frame.eof
                    data = frame.unused_data if finished else b""
        except zstandard.ZstdError as error:
            raise SourceError(f"{path}: the zstd stream is damaged ({error})") from error
    if not finished:
        raise SourceError(f"{path}: the zstd stream ends early: the file is cut short")
