"""Batch memory that is used again once nobody looks at it any more."""

from __future__ import annotations

import mmap
import weakref
from collections import OrderedDict, deque

import torch

_LEAST_BYTES = 4096


class BlockPool:
    """Leases blocks of bytes, pinned where there is CUDA.

    A lease is a plain tensor. When the last tensor over its storage is gone, views of it included, the block returns to
    the pool; a consumer that keeps its batches keeps their blocks, and nothing is ever overwritten under it. Leased and
    free blocks take at most ``limit_bytes`` together, unless the leased ones alone take more; the free blocks of the
    size that was not asked for the longest are given up first. One thread leases; blocks return from any.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._returned: deque[torch.Tensor] = deque()
        self._free: OrderedDict[int, list[torch.Tensor]] = OrderedDict()
        self._bytes = 0
        self._pin = torch.cuda.is_available()
        self._closed = False

    @staticmethod
    def block_bytes(nbytes: int) -> int:
        """Return the size of the block that a lease of ``nbytes`` takes.

        Sizes are eighths of a power of two apart, so that batches of about one size share their blocks, and a block is
        larger than was asked for by an eighth at most (or is 4 KiB).
        """
        if nbytes <= _LEAST_BYTES:
            return _LEAST_BYTES
        step = 1 << (nbytes - 1).bit_length() - 4
        return -(-nbytes // step) * step

    def lease(self, nbytes: int) -> torch.Tensor:
        """Return a block of at least ``nbytes`` bytes, uint8, of any content."""
        size = self.block_bytes(nbytes)
        self._collect()
        same = self._free.get(size)
        if same:
            block = same.pop()
            self._free.move_to_end(size)
        else:
            self._trim(self._limit - size)
            block = torch.empty(size, dtype=torch.uint8, pin_memory=True) if self._pin else _mapped(size)
            self._bytes += size
        array = block.numpy()
        # from_numpy holds this very array object as long as the storage lives; a deque's append needs no lock, so that
        # the finalizer may run at any point, in any thread.
        weakref.finalize(array, self._give_back, block).atexit = False
        return torch.from_numpy(array)

    def close(self) -> None:
        """Give the free blocks up; leased ones go when their tensors do."""
        self._closed = True
        self._returned.clear()
        self._free.clear()

    def _collect(self) -> None:
        """Take stock of what came back since the last lease."""
        for _ in range(len(self._returned)):
            block = self._returned.popleft()
            self._free.setdefault(block.numel(), []).append(block)
        self._trim(self._limit)

    def _trim(self, limit: int) -> None:
        """Give free blocks up until all blocks take at most ``limit`` bytes, or none is free."""
        while self._bytes > limit and self._free:
            size, blocks = next(iter(self._free.items()))
            if blocks:
                blocks.pop()
                self._bytes -= size
            else:
                del self._free[size]

    def _give_back(self, block: torch.Tensor) -> None:
        if not self._closed:
            self._returned.append(block)


def _mapped(nbytes: int) -> torch.Tensor:
    """Return memory straight from the system, in huge pages where it has them, which goes back there when freed.

    An allocator would keep a freed block for later, and map it in small pages.
    """
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
