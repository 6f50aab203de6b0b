"""The metrics of a training: a line of JSON each, and TensorBoard's files where they are asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
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

    ``check`` is called before anything is written, and may raise to stop. ImportError when ``tensorboard`` is asked for
    and not installed; ValueError, naming file and line, for a line that no journal wrote.
    """

    def __init__(
        self, directory: Path, step: int, *, tensorboard: bool = False, check: Callable[[], None] = lambda: None
    ) -> None:
        self._check = check
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / METRICS
        kept = [line for line, metrics in _read(path) if metrics.step <= step] if step else []
        check()
        self._board = _board(directory / "tensorboard", step) if tensorboard else None
        temporary = directory / f".{METRICS}.tmp"
        try:
            temporary.write_bytes(b"".join(kept))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        """Write the figures of a step; ``kind`` is train or validation."""
        self._check()
        self._file.write(json.dumps({"kind": kind, "step": step, **figures}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in figures.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)
            self._board.flush()

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
    return [metrics for _, metrics in _read(directory / METRICS)]


def _read(path: Path) -> list[tuple[bytes, Metrics]]:
    """Return the lines that were written to their end, each as it stands there and as what it says."""
    if not path.exists():
        return []
    *whole, _ = path.read_bytes().split(b"\n")
    return [(line + b"\n", _metrics(f"{path}:{number}", line)) for number, line in enumerate(whole, 1)]


def _metrics(place: str, line: bytes) -> Metrics:
    try:
        fields: dict[str, Any] = json.loads(line)
        kind, step = fields.pop("kind"), fields.pop("step")
        if kind not in ("train", "validation") or type(step) is not int:
            raise ValueError(f"kind is {kind!r}, step {step!r}")
        return Metrics(kind, step, {name: float(value) for name, value in fields.items()})
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{place} is no line of metrics of a training: {error!r}; mend it or remove that line"
        ) from error


def _board(directory: Path, step: int) -> Any:  # noqa: ANN401 - of a package that may not be there
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise ImportError("--tensorboard needs the package tensorboard: pip install 'dspark-store[train]'") from error
    return SummaryWriter(directory, purge_step=step + 1 if step else 0)
