"""``dspark-store plot``: a figure of how trainings went."""

from __future__ import annotations

import argparse
from pathlib import Path

from dspark_store.text import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("trainings", nargs="+", help="the --output-dir of each training, one colour each")
    parser.add_argument(
        "--output", default="training.png", help="the figure to write, as its ending says: .png, .svg or .pdf"
    )


def run(given: argparse.Namespace) -> int:
    """Write the figure and tell where it is; return 0.

    ImportError without matplotlib, ValueError for a training without metrics and for an unknown ending.
    """
    try:
        from dspark_store.training.curves import ENDINGS, Curves, draw_curves
    except ImportError as error:
        raise ImportError("plot needs the package matplotlib: pip install 'dspark-store[plot]'") from error
    output = Path(given.output)
    if output.suffix not in ENDINGS:
        raise ValueError(f"--output {output} must end with one of {', '.join(ENDINGS)}")
    if output.is_dir():
        raise ValueError(f"--output {output} is a directory: name a file")
    if output.parent.exists() and not output.parent.is_dir():
        raise ValueError(f"--output {output} cannot be written: {output.parent} is a file")
    trainings = [Curves.of(Path(training)) for training in given.trainings]
    output.parent.mkdir(parents=True, exist_ok=True)
    draw_curves(trainings, output)
    say(f"written: {output}")
    return 0
