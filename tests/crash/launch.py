"""Starting jobs of any number of ranks in forks of one process that has imported everything: see `zygote`."""

import atexit
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.crash.orders import Ends, Order, Outcome, RankOutcome
from tests.processes import ROOT

_REPLY_SECONDS = 400.0


@functools.cache
def zygote() -> "Zygote":
    """Return the zygote of this process; it ends with it."""
    started = Zygote()
    atexit.register(started.close)
    return started


class Zygote:
    def __init__(self) -> None:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        environment = {**os.environ, **threads, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._numbers = itertools.count()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.zygote"],
            stdin=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )

    def start(self, arguments: Sequence[object], store: Path, **what: Any) -> "Running":
        """Start a job of ``world`` ranks; ``what`` else is in `Order`."""
        folder = Path(self._folder.name) / str(next(self._numbers))
        folder.mkdir()
        order = Order([str(item) for item in arguments], str(store), str(folder), **what)
        if self._process.stdin is None:
            raise RuntimeError("the zygote was started without a pipe")
        self._process.stdin.write(order.to_line())
        self._process.stdin.flush()
        return Running(self._process, order)

    def run(self, arguments: Sequence[object], store: Path, **what: Any) -> Outcome:
        """Run a job to its end."""
        return self.start(arguments, store, **what).wait()

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


@dataclass(frozen=True, slots=True)
class Running:
    """A job that has been started."""

    process: "subprocess.Popen[str]"
    order: Order

    def wait_for(self, event: str, rank: int = 0) -> None:
        """Wait until a rank has told of an event."""
        trace = self.order.file(rank, "trace")
        self._wait_until(lambda: trace.exists() and f" {event}\n" in trace.read_text(), event)

    def wait(self) -> Outcome:
        """Wait until all ranks have ended."""
        self._wait_until(self.order.reply.exists, "an end")
        ends = Ends(**json.loads(self.order.reply.read_text()))
        return Outcome(ends, tuple(self._rank(rank, ends) for rank in range(self.order.world)))

    def _wait_until(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _REPLY_SECONDS
        while not ready():
            if self.process.poll() is not None:
                raise RuntimeError("the zygote has ended")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no sign of {what}")
            time.sleep(0.005)

    def _rank(self, rank: int, ends: Ends) -> RankOutcome:
        trace, log = self.order.file(rank, "trace"), self.order.file(rank, "log")
        lines = trace.read_text().splitlines() if trace.exists() else []
        events = tuple((float(line.split(" ", 1)[0]), line.split(" ", 1)[1]) for line in lines)
        text = log.read_text() if log.exists() else ""
        return RankOutcome(os.waitstatus_to_exitcode(ends.statuses[rank]), ends.times[rank], events, text)
