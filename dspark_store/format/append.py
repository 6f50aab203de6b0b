"""Appending to a file of the local disk: through the page cache, or past it.

Copying into the page cache costs a third of what compressing costs, and fills memory with bytes that are not read
again soon. A large object therefore goes straight to the disk, from an aligned buffer, where the file system allows it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Buffer, Sequence
from typing import Protocol

IOV_MAX = 1024  # buffers that the kernel takes in one vectored call
_WRITE_BEHIND = 8 * 1024 * 1024
_STAGED = 4 * 1024 * 1024


class Appender(Protocol):
    """Appends to a file that is open for writing and empty."""

    def append(self, parts: Sequence[Buffer]) -> None:
        """Append bytes, one part after the other."""
        ...

    def finish(self) -> None:
        """Hand everything to the file. The caller makes it durable."""
        ...

    def close(self) -> None:
        """Let the appender's memory go; what is not yet in the file is dropped."""
        ...


class CachedAppender:
    """`Appender` through the page cache.

    The disk begins with the bytes as they come, so that the fsync at an object's end has little left to wait for.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._written = self._started = 0

    def append(self, parts: Sequence[Buffer]) -> None:
        """See `Appender`."""
        for first in range(0, len(parts), IOV_MAX):
            self._append_group([memoryview(part).cast("B") for part in parts[first : first + IOV_MAX]])
        if self._written - self._started >= _WRITE_BEHIND:
            _start_writeback(self._descriptor, self._started, self._written - self._started)
            self._started = self._written

    def finish(self) -> None:
        """See `Appender`."""

    def close(self) -> None:
        """See `Appender`."""

    def _append_group(self, views: list[memoryview]) -> None:
        while views:
            count = os.writev(self._descriptor, views)
            self._written += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]


class DirectAppender:
    """`Appender` past the page cache (``O_DIRECT``), through a buffer of 4 MiB.

    Raises OSError when the file system has no such writes, or there is no memory for the buffer; the file is then as
    it was. A file system that says so only at a write gets that one and all later ones through the page cache.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = memoryview(mmap.mmap(-1, _STAGED))  # whose memory is aligned as direct writes need it
        self._filled = 0
        _set_direct(descriptor, wanted=True)  # last: who goes on without this buffer needs a file that is not direct

    def append(self, parts: Sequence[Buffer]) -> None:
        """See `Appender`."""
        for part in parts:
            view = memoryview(part).cast("B")
            while len(view):
                count = min(len(view), _STAGED - self._filled)
                self._buffer[self._filled : self._filled + count] = view[:count]
                self._filled += count
                view = view[count:]
                if self._filled == _STAGED:
                    self._flush()

    def finish(self) -> None:
        """See `Appender`; the end of an object is not aligned, and goes through the page cache."""
        _set_direct(self._descriptor, wanted=False)
        self._flush()

    def close(self) -> None:
        """See `Appender`; the memory goes with its last view, which an error's traceback may still hold."""
        self._buffer = memoryview(b"")

    def _flush(self) -> None:
        view = self._buffer[: self._filled]
        while len(view):
            try:
                count = os.write(self._descriptor, view)
            except OSError as error:
                if error.errno != errno.EINVAL or not _is_direct(self._descriptor):
                    raise
                _set_direct(self._descriptor, wanted=False)
                continue
            view = view[count:]
        self._filled = 0


def open_appender(descriptor: int, *, large: bool) -> Appender:
    """Return what appends to a file: past the page cache when it may become ``large`` and the file system can."""
    if large and hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):
            return DirectAppender(descriptor)
    return CachedAppender(descriptor)


def _is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def _set_direct(descriptor: int, *, wanted: bool) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)


def _start_writeback(descriptor: int, begin: int, length: int) -> None:
    """Let the disk begin with these bytes: Linux does when it is told that they are not needed."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # advice: a file system may not take it
            os.posix_fadvise(descriptor, begin, length, os.POSIX_FADV_DONTNEED)
