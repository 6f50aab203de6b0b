"""Files of rows: JSON Lines read by offset, JSON documents, and what unpacks them."""

import gzip
import hashlib
import json
import math
import os
import shutil
import tempfile
import weakref
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from dspark_store.sources.rows import MAX_ROW_BYTES, RowData, Rows, parse_json
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


class JsonlRows(Rows):
    """JSON Lines. Memory is 8 bytes per row, whatever the rows hold.

    Only `\\n` ends a line (a row may contain U+2028 and the like), and lines of white space are skipped.
    """

    def __init__(self, path: Path, spool: Spool | None = None) -> None:
        """Read the file once, for its SHA-256 and the offset of each row.

        Args:
            path: the file.
            spool: a file that holds the text in its place, for a compressed `path`.

        """
        self.name = str(path)
        self._path = path
        self._spool = spool
        self._file: BinaryIO | None = None
        self._version: tuple[int, int] | None = None
        digest = hashlib.sha256()
        offsets, blank_before_row = array("q"), array("q")
        file = self._opened()
        file.seek(0)
        position = 0
        while line := file.readline(MAX_ROW_BYTES + 1):
            digest.update(line)
            if line.isspace() and len(line) <= MAX_ROW_BYTES:
                blank_before_row.append(len(offsets))
            else:
                offsets.append(position)
            position += len(line)
            while not line.endswith(b"\n") and (line := file.readline(MAX_ROW_BYTES + 1)):
                digest.update(line)
                position += len(line)
        self.content_sha256 = digest.hexdigest()
        self._offsets = np.array(offsets, dtype=np.int64)
        self._blank_before_row = np.array(blank_before_row, dtype=np.int64)
        self.close()

    def __len__(self) -> int:
        """Return the number of lines that are not blank."""
        return len(self._offsets)

    def where(self, row: int) -> str:
        """Return the file and the line, counted from 1 and with the blank ones."""
        blanks = int(np.searchsorted(self._blank_before_row, row, side="right"))
        return f"{self.name}, line {row + blanks + 1}"

    def take(self, rows: Sequence[int]) -> list[RowData]:
        """Return the given lines; SourceError if the file has changed since their offsets were taken."""
        file = self._opened()
        lines: list[RowData] = []
        for row in rows:
            file.seek(int(self._offsets[row]))
            lines.append(file.readline(MAX_ROW_BYTES + 1))
        return lines

    def close(self) -> None:
        """Close the file; a spool stays, since it is the only place of the text."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> BinaryIO:
        if self._spool is not None:
            return self._spool.file
        if self._file is None:
            self._file = self._path.open("rb")
            status = os.fstat(self._file.fileno())
            version = (status.st_size, status.st_mtime_ns)
            if self._version not in (None, version):
                self.close()
                raise SourceError(f"{self._path} was changed while it was in use; start again")
            self._version = version
        return self._file


class JsonRows(Rows):
    """One JSON document, kept in memory: a list of rows, or one row."""

    def __init__(self, path: Path, content: bytes) -> None:
        """Parse the document; SourceError if it is not JSON."""
        self.name = str(path)
        self.content_sha256 = hashlib.sha256(content).hexdigest()
        try:
            document = parse_json(content, limit=None) if content.strip() else []
        except SourceError as error:
            raise SourceError(
                f"{path}: {error}; expected one JSON document (a file with one JSON object per line is named .jsonl)"
            ) from error
        rows = document if isinstance(document, list) else [document]
        try:
            self._rows = [json.dumps(row).encode() for row in rows]
        except RecursionError as error:
            raise SourceError(f"{path} is nested too deeply to be read") from error

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def take(self, rows: Sequence[int]) -> list[RowData]:
        """Return the JSON text of the given rows."""
        return [self._rows[row] for row in rows]


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
