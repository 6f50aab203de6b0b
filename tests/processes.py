"""Programs that tests run in processes of their own."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run_python(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run this Python with some words, from the checkout's code; return its outcome and what it printed."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, **options)


def until(condition: Callable[[], object], limit: float = 60) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ended_pid() -> int:
    """Return the id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid
