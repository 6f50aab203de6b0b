"""How many bytes a second the storage of a directory gives a reader."""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_READERS, _READ_BYTES = 8, 4 * 2**20


def drop_from_cache(path: Path) -> None:
    """Ask the kernel to drop a file, or all files of a directory, from the page cache."""
    for file in path.rglob("*") if path.is_dir() else (path,):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measured_rate(place: Path, readers: int = _READERS, nbytes: int = 256 * 2**20) -> float:
    """Return bytes a second: a file is written, dropped from the page cache, and read by several threads at once.

    What stands below the kernel may still hold the file in memory: a cache of the host, or of a file server.
    """
    block = os.urandom(_READ_BYTES)
    with tempfile.NamedTemporaryFile(dir=place) as file:
        for _ in range(max(1, nbytes // _READ_BYTES)):
            file.write(block)
        file.flush()
        drop_from_cache(Path(file.name))
        size = file.tell()
        started = time.perf_counter()
        with ThreadPoolExecutor(max(readers, _READERS)) as pool:
            list(pool.map(lambda at: os.pread(file.fileno(), _READ_BYTES, at), range(0, size, _READ_BYTES)))
        return size / (time.perf_counter() - started)
