"""A temporary file that lives as long as the object that reads it."""

import math
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import BinaryIO, cast

from dspark_store.sources.source import SourceError

LEAST_LIMIT = 1024 * 1024 * 1024
MOST_TIMES = 256  # text becomes 3 to 30 times larger, repeated system prompts and all
_SHARE_OF_DISK = 0.95


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
