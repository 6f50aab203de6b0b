"""The page of measurements: what the benchmarks left as JSON, joined with the prose of a template.

``python -m benchmarks.report [--from bench] [--to docs/benchmarks.md]`` reads every ``*.json`` that a benchmark wrote
and replaces the page; plots go to ``images/`` beside it. No figure stands in the template, so every one in the page
was measured. The comparisons that come out against this project are listed in its last section.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2

from benchmarks.tables import Machine, Outcome, PeerComparison, load_outcome

TEMPLATE = Path(__file__).with_name("report.md.jinja")
IMAGES = "images"


class Loss(NamedTuple):
    """Something that ours did worse than a peer, in which run."""

    outcome: Outcome
    comparison: PeerComparison


def losses(outcomes: Sequence[Outcome]) -> list[Loss]:
    """Return every comparison below 1, in the order in which they were measured."""
    return [
        Loss(outcome, comparison)
        for outcome in outcomes
        for table in outcome.tables
        for comparison in table.comparisons
        if comparison.ratio < 1
    ]


def machines(outcomes: Sequence[Outcome]) -> list[Machine]:
    """Return the machines that were measured on, each once."""
    distinct = {repr(outcome.machine): outcome.machine for outcome in outcomes}
    return list(distinct.values())


def read_outcomes(folder: Path) -> list[Outcome]:
    """Read what the benchmarks left in a folder, by file name; FileNotFoundError when there is nothing."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise FileNotFoundError(f"{folder} has no *.json of a benchmark: run `make bench` first")
    return [load_outcome(path) for path in paths]


def render(outcomes: Sequence[Outcome]) -> str:
    """Return the page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE.parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(TEMPLATE.name).render(
        outcomes=outcomes, machines=machines(outcomes), losses=losses(outcomes), images=IMAGES
    )


def main(arguments: Sequence[str]) -> int:
    """Write the page; return the exit code, 2 when there is nothing to join."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--from", dest="source", type=Path, default="bench", help="folder of JSON (default: bench)")
    parser.add_argument("--to", type=Path, default="docs/benchmarks.md", help="page (default: docs/benchmarks.md)")
    given = parser.parse_args(arguments)
    try:
        outcomes = read_outcomes(given.source)
        given.to.write_text(render(outcomes), encoding="utf-8")
        plots = [plot for outcome in outcomes for plot in outcome.plots]
        for plot in plots:
            (given.to.parent / IMAGES).mkdir(exist_ok=True)
            shutil.copyfile(given.source / plot, given.to.parent / IMAGES / plot)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{given.to}: {len(outcomes)} benchmarks, {len(plots)} plots, {len(losses(outcomes))} comparisons lost")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
