"""The ranks of a training: alone, or as torchrun started them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the others, and the device that it trains on."""

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes and tells."""
        return self.rank == 0

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` over all ranks; all of them must ask together."""
        if self.size == 1:
            return values
        values = values.detach().clone()
        dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Wait until all ranks are here."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def joined_ranks(device: torch.device) -> Iterator[Ranks]:
    """Join the ranks that torchrun started, each of those on a host with a CUDA device of its own."""
    if "RANK" not in os.environ:
        yield Ranks(0, 1, device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()
