"""What benchmarks give: tables of figures and comparisons, printed on a terminal and kept as JSON for the report."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "zarr", "numcodecs", "crc32c", "zarrs", "tensorstore", "dask", "safetensors", "pcodec")
_PLACES, _SOURCES = ("--json", "--place", "--out"), ("--store", "--target", "--input-data")
type Cell = str | float | int | bool | None


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading, and how its numbers are shown (a format specification)."""

    name: str
    shown: str = ",.2f"

    def text(self, cell: Cell) -> str:
        """Return a cell as it is shown; nothing for None, yes or nothing for a truth."""
        if cell is None or cell is False:
            return ""
        if cell is True:
            return "yes"
        return cell if isinstance(cell, str) else format(cell, self.shown)


@dataclass(frozen=True, slots=True)
class PeerComparison:
    """Ours against a peer: ``ratio`` is above 1 where ours is better."""

    where: str
    ours: str
    peer: str
    ratio: float


@dataclass(frozen=True, slots=True)
class Table:
    """Figures under a title, what they mean below them, and the comparisons that they make."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    comparisons: tuple[PeerComparison, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.title!r} has {len(self.columns)} columns, and a row of {len(row)}")

    def markdown(self) -> str:
        """Return the table and its notes, without the title."""
        lines = [
            "| " + " | ".join(column.name for column in self.columns) + " |",
            "|" + "---|" * len(self.columns),
            *(
                "| " + " | ".join(column.text(cell) for column, cell in zip(self.columns, row, strict=True)) + " |"
                for row in self.rows
            ),
        ]
        return "\n".join([*(lines if self.rows else []), *(f"\n{note}" for note in self.notes)])


@dataclass(frozen=True, slots=True)
class Machine:
    """Where something was measured."""

    processor: str
    cores: int
    memory_gib: float
    system: str
    python: str
    packages: dict[str, str]


def this_machine() -> Machine:
    """Return what can be told of the machine without naming it."""
    return Machine(
        processor=_processor(),
        cores=usable_cores(),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        system=f"{platform.system()} {platform.release().split('-')[0]}",
        python=platform.python_version(),
        packages={name: version(name) for name in PACKAGES if find_spec(name)},
    )


def usable_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of a benchmark: its command, how long it took, what it ran on, its tables and its plots."""

    benchmark: str
    command: str
    seconds: float
    setup: str
    machine: Machine
    tables: tuple[Table, ...]
    plots: tuple[str, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write this as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")


def load_outcome(path: Path) -> Outcome:
    """Read an outcome; ValueError naming the file when it is none."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        tables = tuple(_table(table) for table in fields.pop("tables"))
        machine = Machine(**fields.pop("machine"))
        return Outcome(**fields | {"tables": tables, "machine": machine, "plots": tuple(fields["plots"])})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the outcome of a benchmark ({error}): run the benchmark again") from error


def _table(fields: dict[str, Any]) -> Table:
    return Table(
        fields["title"],
        tuple(Column(**column) for column in fields["columns"]),
        tuple(tuple(row) for row in fields["rows"]),
        tuple(fields["notes"]),
        tuple(PeerComparison(**comparison) for comparison in fields["comparisons"]),
    )


class Recorder:
    """Prints tables as they come, and keeps them for the outcome of a benchmark."""

    def __init__(self, benchmark: str, arguments: Sequence[str]) -> None:
        self._benchmark = benchmark
        self._started = time.perf_counter()
        self._arguments = _recorded(arguments)
        self.tables: list[Table] = []
        self.setup = ""

    def describe(self, setup: str) -> None:
        """Print what is measured, and keep it."""
        self.setup = setup
        print(setup, flush=True)

    def add(self, table: Table) -> None:
        """Print a table, and keep it."""
        self.tables.append(table)
        print(f"\n{table.title}\n\n{table.markdown()}", flush=True)

    def outcome(self, *, plots: Sequence[str] = (), figures: dict[str, Any] | None = None) -> Outcome:
        """Return what was measured so far."""
        command = shlex.join(["python", "-m", f"benchmarks.{self._benchmark}", *self._arguments])
        seconds, machine = time.perf_counter() - self._started, this_machine()
        made = (tuple(self.tables), tuple(plots), figures or {})
        return Outcome(self._benchmark, command, seconds, self.setup, machine, *made)

    def save(self, path: Path | None) -> None:
        """Write the outcome, where a path was given."""
        if path is not None:
            self.outcome().save(path)
            print(f"written to {path}", file=sys.stderr)


def _recorded(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without places of this machine: where results go is left out, a source is its flag."""
    kept = []
    rest = iter([part for argument in arguments for part in argument.split("=", 1)])
    for argument in rest:
        if argument in _PLACES:
            next(rest, None)
        elif argument in _SOURCES:
            next(rest, None)
            kept += [argument, argument.strip("-").upper()]
        else:
            kept.append(argument)
    return kept
