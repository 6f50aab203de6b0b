"""The metrics of a training: a line of JSON each, and TensorBoard's files where they are asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class Metrics:
    """One line: its kind, train or validation, the step after which it was written, and its figures by name."""

    kind: str
    step: int
    figures: Mapping[str, float]


class Journal:
    """Appends metrics to ``metrics.jsonl`` in a directory. Lines past ``step`` are of a run that was cut off: dropped.

    ImportError when ``tensorboard`` is asked for and not installed.
    """

    def __init__(self, directory: Path, step: int, *, tensorboard: bool = False) -> None:
        self._board = _board(directory / "tensorboard", step) if tensorboard else None
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / METRICS
        kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= step] if step else []
        temporary = directory / f".{METRICS}.tmp"
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        """Write the figures of a step; ``kind`` is train or validation."""
        self._file.write(json.dumps({"kind": kind, "step": step, **figures}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in figures.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def flush(self) -> None:
        """Make what was written durable, so that no checkpoint is ahead of its metrics."""
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(directory: Path) -> list[Metrics]:
    """Return the lines that a training wrote, in their order; none where there is no file.

    ValueError, naming file and line, for one that no journal wrote.
    """
    path = directory / METRICS
    return [_metrics(f"{path}:{number}", line) for number, line in enumerate(_whole_lines(path), 1)]


def _metrics(place: str, line: str) -> Metrics:
    try:
        fields: dict[str, Any] = json.loads(line)
        kind, step = fields.pop("kind"), fields.pop("step")
        if kind not in ("train", "validation") or not isinstance(step, int):
            raise ValueError(f"kind is {kind!r}, step {step!r}")
        return Metrics(kind, step, {name: float(value) for name, value in fields.items()})
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{place} is no line of metrics of a training: {error!r}") from error


def _whole_lines(path: Path) -> list[str]:
    """Return the lines that were written to their end."""
    if not path.exists():
        return []
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]


def _board(directory: Path, step: int) -> Any:  # noqa: ANN401 - of a package that may not be there
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise ImportError("--tensorboard needs the package tensorboard: pip install 'dspark-store[train]'") from error
    return SummaryWriter(directory, purge_step=step + 1 if step else 0)
