"""Compressed files of rows, unpacked once into a temporary file."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from dspark_store.sources.source import SourceError
from dspark_store.sources.spool import Spool

GZIP, ZSTD = ".gz", ".zst"
_MAGIC = {b"\x1f\x8b": GZIP, b"\x28\xb5\x2f\xfd": ZSTD}
_BLOCK = 1024 * 1024
_ZSTD_BLOCK = 1024  # at most 32 MiB of contents, 128 KiB of each 4 bytes, which are made in one piece


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
