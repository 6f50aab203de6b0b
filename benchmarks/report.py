"""The page of measurements: what the benchmarks left as JSON, joined with the prose of a template.

``python -m benchmarks.report [--from bench] [--to docs/benchmarks.md]`` reads every ``*.json`` that a benchmark wrote
and makes the page anew; plots go to ``images/`` beside it. A section whose benchmark left none stays as it is in the
page. No figure stands in the template, so every one in the page was measured. The comparisons that come out against
this project are listed in its last section, each with the reason that `reasons.toml` gives.
"""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jinja2

from benchmarks.flags import parsed
from benchmarks.tables import Machine, Outcome, PeerComparison, load_outcome

TEMPLATE = Path(__file__).with_name("report.md.jinja")
REASONS = Path(__file__).with_name("reasons.toml")
IMAGES = "images"
UNKNOWN = "no reason known"
TITLES = {
    "chunk_sizes": "Choosing chunk sizes",
    "loaders": "Reading and writing beside the peers",
    "writers": "What writing costs",
    "loader_scale": "Scale",
    "tokenise": "Tokenising",
    "ratios": "How far states compress",
    "drafts": "What fewer bytes cost a draft",
}
LOST = "Where we lose"


class Loss(NamedTuple):
    """Something that ours did worse than a peer, in which run."""

    outcome: Outcome
    comparison: PeerComparison

    def row(self) -> str:
        """Return its row of the page."""
        one, states = self.comparison, self.outcome.setup.split(" states")[0]
        where = f"{one.where} ({states})" if self.outcome.benchmark == "loaders" else one.where
        return f"| {title_of(self.outcome)} | {where} | {one.ours} | {one.peer} | {one.ratio:.2f} | {reason_of(one)} |"


def title_of(outcome: Outcome) -> str:
    """Return the title of an outcome's section."""
    return TITLES.get(outcome.benchmark, outcome.benchmark.replace("_", " ").capitalize())


@cache
def _reasons() -> list[dict[str, str]]:
    found: list[dict[str, str]] = tomllib.loads(REASONS.read_text(encoding="utf-8"))["reason"]
    return found


def reason_of(comparison: PeerComparison) -> str:
    """Return why a comparison comes out below one, in a sentence."""
    for reason in _reasons():
        if all(re.search(reason.get(name, ""), getattr(comparison, name)) for name in ("where", "ours", "peer")):
            return reason["because"]
    return UNKNOWN


def losses(outcomes: Sequence[Outcome]) -> list[Loss]:
    """Return every comparison below 1, in the order in which they were measured."""
    return [
        Loss(outcome, comparison)
        for outcome in outcomes
        for table in outcome.tables
        for comparison in table.comparisons
        if comparison.ratio < 1
    ]


def machine_text(machine: Machine) -> str:
    """Return what the page says of a machine."""
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    cores = f"{machine.cores} cores, {machine.memory_gib:.0f} GiB"
    return f"Measured on {machine.processor}, {cores}, {machine.system}, Python {machine.python}\n({packages})."


def read_outcomes(folder: Path) -> list[Outcome]:
    """Read what the benchmarks left in a folder, by file name; FileNotFoundError when there is nothing."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise FileNotFoundError(f"{folder} has no *.json of a benchmark: run `make bench` first")
    return [load_outcome(path) for path in paths]


def _sections(page: str) -> Iterator[tuple[str, str]]:
    """Yield title and text of each section of a page."""
    for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        yield title, text.strip()


def render(outcomes: Sequence[Outcome], page: str = "") -> str:
    """Return the page; sections of ``page``, as it was, stay where nothing was measured anew."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE.parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    measured, before = {title_of(outcome) for outcome in outcomes}, dict(_sections(page))
    lost = [line for line in before.pop(LOST, "").splitlines() if line.startswith("| ")][1:]
    kept = {title: text for title, text in before.items() if title not in measured}
    machines = re.findall(r"^Measured on .*\n\(.*\)\.$", page, flags=re.MULTILINE) if kept else []
    return environment.get_template(TEMPLATE.name).render(
        outcomes=outcomes,
        machines=list(dict.fromkeys([*map(machine_text, (outcome.machine for outcome in outcomes)), *machines])),
        losses=[
            *(loss.row() for loss in losses(outcomes)),
            *(line for line in lost if line.removeprefix("| ").split(" | ")[0] in kept),
        ],
        titles=TITLES,
        title_of=title_of,
        kept=kept,
        images=IMAGES,
    )


def main(arguments: Sequence[str]) -> int:
    """Write the page; return the exit code, 2 when there is nothing to join."""
    given = parsed("report", arguments)
    try:
        outcomes = read_outcomes(given.source)
        page = given.to.read_text(encoding="utf-8") if given.to.exists() else ""
        given.to.write_text(render(outcomes, page), encoding="utf-8")
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
