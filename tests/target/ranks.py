"""Runs a function in several processes that form one gloo group, and gives back what each returned."""

import io
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

_PRELOADED = ("dspark_store.target.sharded", "tests.tiny")  # imported once, in the process that the others fork from


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 90) -> list[Any]:
    """Call `function(rank, *arguments)` in each of `world_size` processes; it may return tensors.

    Raises RuntimeError with the traceback of the first rank that fails, and TimeoutError, after ending them all.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    with TemporaryDirectory() as directory:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(
                target=_in_group, args=(rank, world_size, directory, pipes[rank][1], function, arguments), daemon=True
            )
            for rank in range(world_size)
        ]
        try:
            for process, (_, sender) in zip(processes, pipes, strict=True):
                process.start()
                sender.close()
            return _gather([receiver for receiver, _ in pipes], time.monotonic() + seconds)
        finally:
            _end(processes)


def _in_group(
    rank: int, world_size: int, directory: str, pipe: Connection, function: Callable[..., Any], arguments: tuple[Any]
) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=Path(directory, "store").as_uri(),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=30),
        )
        result = function(rank, *arguments)
        dist.barrier()  # nobody leaves while another still expects something
        packed = io.BytesIO()
        torch.save(result, packed)
        pipe.send_bytes(b"=" + packed.getvalue())
    except BaseException:  # noqa: BLE001  # raised again where the ranks were started
        pipe.send_bytes(b"!" + traceback.format_exc().encode())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _gather(receivers: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        waiting = [receiver for rank, receiver in enumerate(receivers) if rank not in results]
        ready = wait(waiting, max(0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(set(range(len(receivers))) - set(results))} did not finish")
        for rank, receiver in enumerate(receivers):
            if receiver not in ready:
                continue
            try:
                message = receiver.recv_bytes()
            except EOFError:
                raise RuntimeError(f"rank {rank} died") from None
            if message[:1] == b"!":
                raise RuntimeError(f"rank {rank} failed:\n{message[1:].decode()}")
            results[rank] = torch.load(io.BytesIO(message[1:]), weights_only=False)
    return [results[rank] for rank in range(len(receivers))]


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
