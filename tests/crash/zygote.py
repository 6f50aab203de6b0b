"""A process that has imported everything and forks the ranks of each precompute, which start at once and may be killed.

Run as a script: a line of JSON on standard input is one job (`Order`), whose outcome (`Ends`) is put where that says.
Jobs run beside one another. Nothing here computes with torch before a fork, so no thread is lost in one.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from dspark_store.precompute.__main__ import main
from tests.crash.orders import Ends, Order
from tests.crash.traces import trace_and_plant

_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER
_POLL_SECONDS = 0.005
_ORPHANS_SECONDS = 20.0


def serve() -> None:
    """Start jobs until standard input ends."""
    _ = transformers.LlamaForCausalLM, transformers.Qwen3MoeForCausalLM  # transformers imports its classes when asked
    _ = transformers.AutoTokenizer
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise RuntimeError(f"{threads} threads run before the first fork, expected 1")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _run_and_exit(Order.from_line(line))


def _run_and_exit(order: Order) -> None:
    try:
        ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)
        reply = order.reply.with_suffix(".part")
        reply.write_text(json.dumps(asdict(_Job(order).run())))
        reply.replace(order.reply)
    except BaseException:  # noqa: BLE001 - a child must never return into the parent's loop
        traceback.print_exc()
    finally:
        os._exit(0)


class _Job:
    """The ranks of one order, from their start to the end of the last."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._started = time.monotonic()
        self._struck: float | None = None
        port = _free_port()
        self._pids = [_start_rank(order, rank, port) for rank in range(order.world)]
        self._ended: dict[int, tuple[int, float]] = {}

    def run(self) -> Ends:
        overdue = False
        while len(self._ended) < len(self._pids):
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in self._pids:
                self._ended[pid] = (status, time.monotonic())
            elif pid == 0:
                self._strike()
                if not overdue and time.monotonic() > self._started + self._order.limit:
                    overdue = True
                    self._signal(self._pids, signal.SIGKILL)
                time.sleep(_POLL_SECONDS)
        ends = [self._ended[pid] for pid in self._pids]
        statuses, times = [status for status, _ in ends], [when for _, when in ends]
        return Ends(statuses, times, self._started, self._struck, _end_orphans(), overdue)

    def _strike(self) -> None:
        strike = self._order.strike
        if strike is None or self._struck is not None or time.monotonic() < self._started + strike.after:
            return
        ranks = strike.ranks or range(self._order.world)
        if strike.event and not any(self._has_told(rank, strike.event) for rank in ranks):
            return
        if strike.met and not all(self._has_told(rank, "joined") for rank in range(self._order.world)):
            return
        self._struck = time.monotonic()
        self._signal([self._pids[rank] for rank in ranks], strike.number)

    def _has_told(self, rank: int, event: str) -> bool:
        trace = self._order.file(rank, "trace")
        return trace.exists() and f" {event}\n" in trace.read_text()

    def _signal(self, pids: list[int], number: int) -> None:
        for pid in pids:
            if pid not in self._ended:
                os.kill(pid, number)  # one that has ended waits as a zombie, and this changes nothing


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _start_rank(order: Order, rank: int, port: int) -> int:
    pid = os.fork()
    if pid == 0:
        _be_a_rank(order, rank, port)
    return pid


def _be_a_rank(order: Order, rank: int, port: int) -> None:
    code = 70
    try:
        log = os.open(order.file(rank, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if order.world > 1:
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": order.world, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
        torch.set_num_threads(1)
        trace_and_plant(order, rank)
        code = main(order.arguments)
    except BaseException:  # noqa: BLE001 - a child must never return into the parent's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_orphans() -> int:
    """Wait for what the ranks have started and left behind; end what stays, and return how much that was."""
    deadline = time.monotonic() + _ORPHANS_SECONDS
    left = 0
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return left
        if pid == 0 and time.monotonic() > deadline:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            left += len(children)
            for child in children:
                os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)
        elif pid == 0:
            time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    serve()
