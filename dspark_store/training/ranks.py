"""The ranks of a training: alone, or as torchrun started them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor

from dspark_store.precompute.rendezvous import Keys, meet, place_in_job

_TIMEOUT = timedelta(days=1)
"""How long ranks wait for each other: rank 0 alone makes an online training's tokens. torchrun ends all if one dies."""


class ToldError(Exception):
    """An error that another rank tells. Its cause is the same error of this rank, where it has one."""


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

    def gathered(self, values: Tensor) -> list[Tensor]:
        """Return every rank's ``values``, of one shape, in the order of ranks; all of them must ask together."""
        if self.size == 1:
            return [values]
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values.contiguous())
        return parts

    def wait(self) -> None:
        """Wait until all ranks are here."""
        if self.size > 1:
            dist.barrier()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Have all ranks leave a block together; it must not hold other calls that they make together.

        What one of them raises there is raised as ToldError on the others.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again below
            failure = error
        failures = self.total(torch.tensor([failure is not None], dtype=torch.int64, device=self.device))
        if failure is not None:
            raise failure
        if int(failures):
            raise ToldError("another rank has failed, and tells why")


@contextmanager
def joined_ranks(device: torch.device) -> Iterator[Ranks]:
    """Join the ranks that torchrun started, each of those on a host with a CUDA device of its own.

    An error that several of them end with in the same words is raised as it is on the first alone, as ToldError on the
    others; after a restart by torchrun, once more. ValueError when the environment describes half of a job.
    """
    if "RANK" not in os.environ:
        yield Ranks(0, 1, device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    rank, size = place_in_job()
    if size == 1:
        yield Ranks(0, 1, device)
        return
    rendezvous = meet(rank, size)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=rendezvous.group_store(_TIMEOUT),
        rank=rank,
        world_size=size,
        timeout=_TIMEOUT,
    )
    try:
        yield Ranks(rank, size, device)
    except ToldError:
        raise
    except Exception as error:
        if _is_told(rendezvous.keys, error):
            raise ToldError(str(error)) from error
        raise
    finally:
        dist.destroy_process_group()


def _is_told(keys: Keys, error: Exception) -> bool:
    """Note that an error is told, where no rank has told it yet; return whether one has."""
    words = blake2b(f"{type(error).__name__}: {error}".encode(), digest_size=16).hexdigest()
    try:
        return keys.add(f"told/{words}", 1) > 1
    except RuntimeError:  # the store is gone with whoever held it: better twice than never
        return False
