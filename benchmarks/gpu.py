"""A capture and the loader on one GPU, measured and checked in under six minutes.

``benchmarks/gpu.sh [--tiny] [--place DIR]`` finds a Python and runs this. A random target of about 1.3 billion
parameters is made on the device; nothing is downloaded. The parts run in a process of its own, each with a limit of
time, and what has been measured is printed whatever happens. With ``$OUT`` set, the table is also in ``$OUT/gpu.json``.
``--tiny`` takes a tiny target, on the CPU where there is no GPU. The exit code is 1 when a check fails or a part does
not end.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PART_SECONDS: Mapping[str, float] = {"target": 120, "capture": 150, "checks": 60, "loader": 60, "step": 45}
"""The parts in order, and how long each may take."""
TOTAL_SECONDS = 330.0


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a figure with its unit, or a check that was ``passed`` or was not."""

    name: str
    value: float
    unit: str
    passed: bool | None = None

    def text(self) -> str:
        """Return the line."""
        verdict = "" if self.passed is None else "ok" if self.passed else "FAILED"
        return f"{self.name:46} {self.value:12,.3f} {self.unit:10} {verdict}".rstrip()


@dataclass(frozen=True, slots=True)
class Message:
    """What the measuring process tells: that a part begins, or a row of it, which replaces one of the same name."""

    part: str
    row: Row | None = None

    def to_json(self) -> str:
        """Return this as one line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Message:
        """Read back what `to_json` returned."""
        fields = json.loads(text)
        return cls(fields["part"], fields["row"] and Row(**fields["row"]))


class Table:
    """The rows so far, and what went wrong."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.problems: list[str] = []

    @property
    def passed(self) -> bool:
        """Whether every part ended and every check passed."""
        return not self.problems and all(row.passed is not False for row in self.rows.values())

    def lines(self) -> Iterator[str]:
        """Yield the lines of the table."""
        yield from (row.text() for row in self.rows.values())
        yield from (f"FAILED: {problem}" for problem in self.problems)

    def to_json(self) -> str:
        """Return the table as JSON."""
        rows = [dataclasses.asdict(row) for row in self.rows.values()]
        return json.dumps({"passed": self.passed, "rows": rows, "problems": self.problems}, indent=2) + "\n"


def measure(command: Sequence[str], table: Table, limits: Mapping[str, float], total: float) -> None:
    """Run the measuring process, and fill the table from what it tells; end it when it is over a limit."""
    ends = time.monotonic() + total
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    part = next(iter(limits))
    deadline = min(ends, time.monotonic() + limits[part])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        threading.Thread(target=_read_lines, args=(process.stdout or (), lines), daemon=True).start()
        try:
            while (line := lines.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
                if not line.startswith("{"):  # a library has printed something
                    print(line, end="", file=sys.stderr)
                    continue
                message = Message.from_json(line)
                if message.row is not None:
                    table.rows[message.row.name] = message.row
                else:
                    part, deadline = message.part, min(ends, time.monotonic() + limits[message.part])
                    print(f"measuring: {part}", file=sys.stderr, flush=True)
            if process.wait() != 0:
                table.problems.append(f"part {part!r} ended with exit code {process.returncode}")
        except queue.Empty:
            table.problems.append(f"part {part!r} was ended: it took longer than its limit")
        finally:
            process.kill()


def _read_lines(stream: Iterable[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a tiny target, on the CPU where there is no GPU")
    parser.add_argument("--place", type=Path, help="directory to write the store in (default: a temporary one)")
    given = parser.parse_args(arguments)
    table = Table()
    if given.place is not None:
        given.place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dspark-gpu-", dir=given.place) as place:
        command = [sys.executable, "-m", "benchmarks.gpu_parts", place, *(["--tiny"] if given.tiny else [])]
        measure(command, table, PART_SECONDS, TOTAL_SECONDS)
    for line in table.lines():
        print(line)
    if os.environ.get("OUT"):
        (Path(os.environ["OUT"]) / "gpu.json").write_text(table.to_json())
    return 0 if table.passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
