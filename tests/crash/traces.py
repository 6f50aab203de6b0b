"""What a forked rank does beside its work: it tells of its steps in a file, and fails where a test wants it to."""

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from dspark_store.precompute.capture import CaptureContext, ShardCapture
from dspark_store.precompute.crew import Crew
from dspark_store.precompute.job_target import JobTarget
from dspark_store.precompute.watch import Watch
from dspark_store.target.sharded import ShardedTarget
from dspark_store.writers.states import StateShardWriter
from tests.crash.orders import Order, Plant
from tests.target.sharded_jobs import parameter_bytes

COUNTED_CALLS = ("fsync", "replace", "link", "unlink", "mkdir")
"""The system calls of which every publish consists; each one inside the store is a possible last one."""

STAGES: dict[str, tuple[Any, str]] = {
    "plan": (import_module("dspark_store.precompute.run"), "plan_job"),
    "load": (import_module("dspark_store.precompute.job_target"), "load_sharded_target"),
    "tokenise": (import_module("dspark_store.precompute.tokenise"), "write_token_shard"),
    "take": (Crew, "next_shard"),
    "forward": (CaptureContext, "forward"),
    "encode": (StateShardWriter, "_encode_chunk"),
    "write": (StateShardWriter, "_store"),
    "finish": (ShardCapture, "finish"),
    "commit": (import_module("dspark_store.precompute.capture"), "publish_states"),
    "publish": (import_module("dspark_store.precompute.fill"), "complete_store"),
}
"""Where a job can be made to fail: the call of each of its stages."""

type Tell = Callable[[str], object]


def trace_and_plant(order: Order, rank: int) -> None:
    """Replace what is traced, and what is planted, in this process."""
    trace = os.open(order.file(rank, "trace"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(event: str) -> None:
        os.write(trace, f"{time.monotonic():.6f} {event}\n".encode())

    tell("begin")
    _trace_captures(tell)
    for stage in ("plan", "load", "tokenise"):
        _replace_call(stage, partial(_told, tell, stage))
    _trace_joining(tell)
    for plant in order.plants:
        if plant.rank == rank:
            _replace_call(plant.stage, _Planted(plant, tell))
    if order.gate:
        _replace_call("take", _Gate(order, rank))
    _trace_calls(tell, order, kills=rank == 0)


def _replace_call(stage: str, around: Callable[..., Any]) -> None:
    """Have ``around`` called in place of a stage's call, with that call before its arguments."""
    owner, name = STAGES[stage]
    call = getattr(owner, name)
    setattr(owner, name, lambda *args, **named: around(call, *args, **named))


def _told(tell: Tell, stage: str, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
    tell(stage)
    return call(*args, **named)


class _Planted:
    def __init__(self, plant: Plant, tell: Tell) -> None:
        self._plant, self._tell, self._calls = plant, tell, 0

    def __call__(self, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        plant = self._plant
        self._calls += 1
        if plant.what == "each":
            time.sleep(plant.seconds)
        elif self._calls == plant.nth:
            self._tell("planted")
            if plant.what == "raise":
                raise RuntimeError(f"planted in {plant.stage} of rank {plant.rank}")
            time.sleep(plant.seconds)
        return call(*args, **named)


class _Gate:
    """Keeps a rank from its first shard until every rank has come so far."""

    def __init__(self, order: Order, rank: int) -> None:
        self._folder, self._rank, self._world, self._open = Path(order.folder), rank, order.world, False

    def __call__(self, call: Callable[..., Any], *args: Any) -> Any:
        if not self._open:
            (self._folder / f"rank{self._rank}.gate").touch()
            while len(list(self._folder.glob("*.gate"))) < self._world:
                time.sleep(0.005)
            self._open = True
        return call(*args)


def _trace_joining(tell: Tell) -> None:
    enter = Watch.__enter__

    def traced_enter(self: Watch) -> Watch:
        entered = enter(self)
        tell("joined")
        return entered

    Watch.__enter__ = traced_enter  # type: ignore[method-assign, assignment]


def _trace_captures(tell: Tell) -> None:
    begin, forward, dummy, load = (
        ShardCapture.__init__,
        CaptureContext.forward,
        CaptureContext.run_dummy,
        JobTarget._load,
    )
    kind = "forward"

    def traced_begin(self: ShardCapture, context: CaptureContext, shard: int) -> None:
        tell(f"shard {shard}")
        begin(self, context, shard)

    def traced_forward(self: CaptureContext, *batch: Any) -> Any:
        tell(kind)
        return forward(self, *batch)

    def traced_dummy(self: CaptureContext) -> None:
        nonlocal kind
        kind = "dummy"
        dummy(self)
        kind = "forward"

    def traced_load(self: JobTarget) -> ShardedTarget:
        target = load(self)
        tell(f"bytes {parameter_bytes(target.model)}")
        return target

    ShardCapture.__init__ = traced_begin  # type: ignore[method-assign]
    CaptureContext.forward = traced_forward  # type: ignore[method-assign, assignment]
    CaptureContext.run_dummy = traced_dummy  # type: ignore[method-assign]
    JobTarget._load = traced_load  # type: ignore[method-assign]


def _path(name: Any, options: dict[str, Any]) -> str:
    """Return the path that a call is given: names may be relative to the descriptor of their folder."""
    folder = options.get("dir_fd", options.get("src_dir_fd"))
    return os.fspath(name) if folder is None else f"{Path(f'/proc/self/fd/{folder}').readlink()}/{name}"


def _trace_calls(tell: Tell, order: Order, *, kills: bool) -> None:
    done, one_at_a_time = 0, threading.Lock()

    def counted(name: str, call: Callable[..., Any], first: Any, *rest: Any, **named: Any) -> Any:
        nonlocal done
        if name == "fsync" or _path(first, named).startswith(order.store):
            with one_at_a_time:
                done += 1
                tell(f"call {name}")
                if kills and done == order.kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
        return call(first, *rest, **named)

    for name in COUNTED_CALLS:
        setattr(os, name, partial(counted, name, getattr(os, name)))
