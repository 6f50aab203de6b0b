"""Programs that tests run in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run_python(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run this Python with some words, from the checkout's code; return its outcome and what it printed."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, **options)


def ended_pid() -> int:
    """Return the id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid
