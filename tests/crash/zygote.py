"""A process that has imported everything and forks a child for each precompute, which starts at once and may be killed.

Run as a script: a line of JSON on standard input is one run (`Order`), a line on standard output its outcome: the
child's wait status and its seconds. Nothing here computes with torch before a fork, so no thread is lost in one.
"""

import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import transformers

from dspark_store.precompute.__main__ import main
from dspark_store.precompute.capture import ShardCapture
from dspark_store.target.capture import CapturedStates, TargetCapture
from dspark_store.writers.states import ShardReport

COUNTED_CALLS = ("fsync", "replace", "link", "unlink", "mkdir")
"""The system calls of which every publish consists; each one inside the store is a possible last one."""


@dataclass(frozen=True, slots=True)
class Order:
    """One run: the command's arguments, and at most one way to be killed.

    ``trace`` is a file that gets a line for every counted call, shard and forward; ``log`` one for all output.
    ``kill_after`` is in seconds; ``kill_at`` kills in place of the n-th counted call, counted from 1.
    """

    arguments: list[str]
    store: str
    trace: str
    log: str
    kill_after: float | None = None
    kill_at: int | None = None


def serve() -> None:
    """Run orders until standard input ends."""
    _ = transformers.LlamaForCausalLM, transformers.AutoTokenizer  # transformers imports its classes when asked for
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise RuntimeError(f"{threads} threads run before the first fork, expected 1")
    for line in sys.stdin:
        print(json.dumps(_run(Order(**json.loads(line)))), flush=True)


def _run(order: Order) -> dict[str, float]:
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _be_the_child(order)
    if order.kill_after is not None:
        time.sleep(order.kill_after)
        os.kill(pid, signal.SIGKILL)  # a child that has ended waits as a zombie, and this changes nothing
    _, status = os.waitpid(pid, 0)
    return {"status": status, "seconds": time.monotonic() - started}


def _be_the_child(order: Order) -> None:
    code = 70
    try:
        log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        trace = os.open(order.trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        torch.set_num_threads(1)
        _trace_captures(trace)
        _trace_calls(trace, order)
        code = main(order.arguments)
    except BaseException:  # noqa: BLE001 - a child must never return into the parent's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _trace_captures(trace: int) -> None:
    run, forward = ShardCapture.run, TargetCapture.__call__

    def traced_run(self: ShardCapture, shard: int, on_batch: Callable[[int], None]) -> ShardReport:
        os.write(trace, f"shard {shard}\n".encode())
        return run(self, shard, on_batch)

    def traced_forward(self: TargetCapture, ids: torch.Tensor, attention: torch.Tensor) -> CapturedStates:
        os.write(trace, b"forward\n")
        return forward(self, ids, attention)

    ShardCapture.run = traced_run  # type: ignore[method-assign]
    TargetCapture.__call__ = traced_forward  # type: ignore[method-assign, assignment]


def _trace_calls(trace: int, order: Order) -> None:
    done = 0

    def counted(name: str, call: Callable[..., Any], first: Any, *rest: Any, **named: Any) -> Any:
        nonlocal done
        if name == "fsync" or os.fspath(first).startswith(order.store):
            done += 1
            os.write(trace, f"call {name}\n".encode())
            if done == order.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return call(first, *rest, **named)

    for name in COUNTED_CALLS:
        setattr(os, name, partial(counted, name, getattr(os, name)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run: its exit code (negative: the signal), its seconds and what it did."""

    exit_code: int
    seconds: float
    calls: int
    shards: tuple[int, ...]
    forwards: int
    log: str


def outcome_of(order: Order, reply: str) -> Outcome:
    """Read an outcome from the zygote's reply and the files that the child wrote."""
    answer = cast("dict[str, float]", json.loads(reply))
    log, trace = Path(order.log), Path(order.trace)
    events = trace.read_text().split("\n") if trace.exists() else []
    return Outcome(
        exit_code=os.waitstatus_to_exitcode(int(answer["status"])),
        seconds=answer["seconds"],
        calls=sum(event.startswith("call ") for event in events),
        shards=tuple(int(event.split()[1]) for event in events if event.startswith("shard ")),
        forwards=events.count("forward"),
        log=log.read_text() if log.exists() else "",
    )


def order_text(order: Order) -> str:
    """Return an order as the line that the zygote reads."""
    return json.dumps(dataclasses.asdict(order)) + "\n"


if __name__ == "__main__":
    serve()
