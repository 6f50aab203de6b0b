"""Curves of trainings: loss, tokens per step of the target, and acceptance along a block, from their ``metrics.jsonl``.

Needs matplotlib, the extra ``plot``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dspark_store.training.journal import METRICS, Metrics, read_metrics

ENDINGS = (".png", ".svg", ".pdf")
_SIZE = (13.0, 3.8)
_PANELS = {"loss": "loss", "tau": "tau: tokens a step of the target"}


@dataclass(frozen=True, slots=True)
class Curves:
    """What one training wrote: its metrics while it learned, and those of its validations."""

    name: str
    training: Sequence[Metrics]
    validations: Sequence[Metrics]

    @classmethod
    def of(cls, directory: Path) -> Curves:
        """Read the metrics of a training's output directory. ValueError when it has none."""
        if not directory.is_dir():
            raise ValueError(f"there is no directory {directory}: give the --output-dir of a training")
        lines = read_metrics(directory)
        if not lines:
            raise ValueError(f"{directory} has no {METRICS} with lines in it: give the --output-dir of a training")
        name = str(directory)
        name = f"./{name}" if name.startswith("_") else name  # matplotlib's legends leave out what begins with _
        kinds = ([line for line in lines if line.kind == kind] for kind in ("train", "validation"))
        return cls(name, *kinds)

    @property
    def acceptance(self) -> tuple[int, list[float]]:
        """The step of the last validation, of the last line of training without one, and its acceptance by slot."""
        last = (self.validations or self.training)[-1]
        slots = sum(name.startswith("accept@") for name in last.figures)
        return last.step, [last.figures[f"accept@{slot}"] for slot in range(slots)]


def draw_curves(trainings: Sequence[Curves], path: Path) -> None:
    """Draw trainings into one figure, in the format that the ending of ``path`` names, which is one of `ENDINGS`."""
    partial = path.with_name(f".{path.stem}.tmp{path.suffix}")
    try:
        with style.context("dspark_store.plot"):
            _figure(trainings).savefig(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _figure(trainings: Sequence[Curves]) -> Figure:
    figure = Figure(figsize=_SIZE, layout="constrained")
    *by_step, by_slot = figure.subplots(1, len(_PANELS) + 1)
    by_step[0].set_yscale("log")  # an untrained draft's loss would flatten all the others
    by_step[0].set_ylabel("logarithmic")
    by_step[0].yaxis.set_major_formatter("{x:g}")
    by_step[0].yaxis.set_minor_formatter("{x:g}")
    for (name, title), axes in zip(_PANELS.items(), by_step, strict=True):
        for number, curves in enumerate(trainings):
            colour = f"C{number}"
            if curves.training:
                points = _points(curves.training, name)
                axes.plot(*points, color=colour, alpha=0.45, label=f"{curves.name}, training")
            if curves.validations:
                points = _points(curves.validations, name)
                axes.plot(*points, color=colour, marker="o", label=f"{curves.name}, validation")
        _finish(axes, title, "step")
    for curves in trainings:
        step, accepted = curves.acceptance
        by_slot.plot(range(1, len(accepted) + 1), accepted, marker="o", label=f"{curves.name}, step {step}")
    by_slot.set_ylim(bottom=0)
    by_slot.locator_params(axis="x", integer=True)
    _finish(by_slot, "acceptance by place in the block", "place")
    return figure


def _points(lines: Sequence[Metrics], name: str) -> tuple[list[int], list[float]]:
    """Return steps and values; a line of which there was nothing to count has no such value."""
    told = [line for line in lines if name in line.figures]
    return [line.step for line in told], [line.figures[name] for line in told]


def _finish(axes: Axes, title: str, below: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(below)
    axes.legend().set_in_layout(False)  # long names of directories would squeeze the axes to nothing
