"""Tensors of any shape between two ranks: a header that says what comes, then the values."""

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_DIMENSIONS = 4
_HEADER_LENGTH = 3 + _MOST_DIMENSIONS  # number of the message, dtype, count of dimensions, dimensions
_IN_FLIGHT = 2


class TensorChannel:
    """One direction between this rank and `peer`, its number in the default group; messages arrive in order."""

    def __init__(self, peer: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self._peer = peer
        self._group = group
        self._device = device
        self._count = 0
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, tensor: Tensor) -> None:
        """Start to send `tensor`, of at most 4 dimensions; wait only while two earlier ones have not arrived."""
        tensor = tensor.detach().contiguous()
        shape = list(tensor.shape) + [0] * (_MOST_DIMENSIONS - tensor.dim())
        fields = [self._count, _DTYPES.index(tensor.dtype), tensor.dim(), *shape]
        header = torch.tensor(fields, dtype=torch.int64, device=self._device)
        self._count += 1
        self._wait_for_all_but(_IN_FLIGHT)
        for part in (header, tensor):
            work = dist.isend(part, self._peer, group=self._group)
            if work is not None:
                self._sending.append((work, part))

    def receive(self) -> Tensor:
        """Wait for the next tensor.

        Raises RuntimeError when it is not the one that is due.
        """
        header = torch.empty(_HEADER_LENGTH, dtype=torch.int64, device=self._device)
        dist.recv(header, self._peer, group=self._group)
        number, dtype, dimensions, *shape = header.tolist()
        if number != self._count:
            raise RuntimeError(f"rank {self._peer} sent message {number} where {self._count} was due")
        self._count += 1
        tensor = torch.empty(shape[:dimensions], dtype=_DTYPES[dtype], device=self._device)
        dist.recv(tensor, self._peer, group=self._group)
        return tensor

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        self._wait_for_all_but(0)

    def _wait_for_all_but(self, messages: int) -> None:
        while len(self._sending) > 2 * messages:
            work, _kept_alive = self._sending.popleft()
            work.wait()
