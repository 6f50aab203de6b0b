"""Chunk buffers that are used again and again, so that a long job's memory does not fragment."""

from __future__ import annotations

import threading

import numpy as np


class BufferPool:
    """Hands out byte buffers of one size, and takes them back.

    It grows to as many as are ever out at once, and gives nothing back to the allocator: allocating every chunk anew
    leaves holes that cost up to half of the memory again.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self._lock = threading.Lock()

    def acquire(self, nbytes: int) -> np.ndarray:
        """Return a buffer of ``nbytes`` bytes, (nbytes,) uint8, of any content."""
        with self._lock:
            while self._free:
                buffer = self._free.pop()
                if buffer.size == nbytes:
                    return buffer
        return np.empty(nbytes, np.uint8)

    def release(self, buffer: np.ndarray) -> None:
        """Take a buffer back; its holder must not touch it afterwards."""
        with self._lock:
            self._free.append(buffer)
