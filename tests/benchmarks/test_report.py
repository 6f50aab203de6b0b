"""Tables, outcomes, and the page that is made of them."""

import re
import tomllib
from dataclasses import replace

import pytest

from benchmarks.loader_scale import scale_table
from benchmarks.peers import rate_table
from benchmarks.report import REASONS, TEMPLATE, UNKNOWN, losses, main, read_outcomes, reason_of, render
from benchmarks.samples import synthetic_samples
from benchmarks.tables import Column, Machine, Outcome, PeerComparison, Recorder, Table, load_outcome, this_machine

NUMBER = re.compile(r"\d[\d,.]*")
MACHINE = Machine("A processor", 3, 23.4, "Linux 7.8", "3.14.0", {"zarr": "3.9.1"})


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[Outcome]:
    """Tables of made-up rates: of chunk sizes, a loader and scale, and of a benchmark that came later."""
    out = tmp_path_factory.mktemp("bench")
    samples = synthetic_samples(24, 8, 5, 6, ragged=True)
    rates = {"safetensors": [91.5, 92.5, 94.0], "ours, none": [211.0, 222.0, 239.0], "ours, fast": [41.0, 42.0, 47.0]}
    table = rate_table("Rows, warm", rates, dict.fromkeys(rates, 12345.0), samples, "safetensors", ["Of 17 rows."])
    index = {"open_s": 0.031, "resident_per_sample": 25.5, "order_s": 0.9, "plan_ms": 0.125}
    scale = scale_table(index, {"epoch": 78.0}, {"open_files": 252.0})
    sizes = Table("Chunk sizes", (Column("T", "d"), Column("MB/s")), ((64, 77.25), (512, 83.5)), ("Of 3 rounds.",))
    for name, tables in (("chunk_sizes", sizes), ("loaders", table), ("loader_scale", scale), ("later", table)):
        recorder = Recorder(name, ["--json", "somewhere", "--samples", "48"])
        recorder.setup = "made-up rates"
        recorder.tables = [tables]
        outcome = recorder.outcome(plots=["read.png", "pareto.png"], figures={"paragraph": "Take T 512."})
        machine = this_machine() if name == "later" else MACHINE
        replace(outcome, machine=machine, plots=outcome.plots if tables is sizes else ()).save(out / f"{name}.json")
    return read_outcomes(out)


def numbers_of(outcome: Outcome) -> set[str]:
    """Every number as the page may show it: each cell as its column does, and all that stand in texts."""
    texts = [outcome.command, outcome.setup, f"{outcome.seconds:.0f}", *outcome.plots]
    texts += [str(value) for value in outcome.figures.values()]
    machine = outcome.machine
    texts += [machine.processor, str(machine.cores), f"{machine.memory_gib:.0f}", machine.system, machine.python]
    texts += [text for package in machine.packages.items() for text in package]
    for table in outcome.tables:
        texts += [table.title, *table.notes, *(column.name for column in table.columns)]
        texts += [column.text(cell) for row in table.rows for column, cell in zip(table.columns, row, strict=True)]
        for one in table.comparisons:
            texts += [one.where, one.ours, one.peer, f"{one.ratio:.2f}"]
    return {number for text in texts for number in NUMBER.findall(text)}


def test_every_figure_of_the_page_is_in_the_json(outcomes):
    page = render(outcomes)
    known = {number.rstrip(".,") for outcome in outcomes for number in numbers_of(outcome)}
    assert {number.rstrip(".,") for number in NUMBER.findall(page)} - known == set()
    for outcome in outcomes:
        for table in outcome.tables:
            assert f"### {table.title}\n\n{table.markdown()}" in page


def test_no_figure_stands_in_the_template():
    prose = re.sub(r"\{%.*?%\}|\{\{.*?\}\}", "", TEMPLATE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert re.findall(r".*\d.*", prose) == []


def test_another_figure_makes_another_page(outcomes):
    page = render(outcomes)
    (loaders,) = (outcome for outcome in outcomes if outcome.benchmark == "loaders")
    (table,) = loaders.tables
    changed = replace(table, rows=(("safetensors", 5555.5, *table.rows[0][2:]), *table.rows[1:]))
    others = [replace(loaders, tables=(changed,)) if outcome is loaders else outcome for outcome in outcomes]
    assert "5,555.5" not in page
    assert "5,555.5" in render(others)


def test_every_comparison_below_one_is_listed_and_no_other(outcomes):
    lost = losses(outcomes)
    assert all(loss.comparison.ratio < 1 for loss in lost)
    everything = [one for outcome in outcomes for table in outcome.tables for one in table.comparisons]
    assert len(lost) == sum(one.ratio < 1 for one in everything)
    section = render(outcomes).split("## Where we lose")[1]
    assert section.count("\n| ") == len(lost) + 1
    assert re.search(r"Rows, warm.*\| ours, fast \| safetensors \| 0.45 \|", section)
    assert not re.search(r"\| ours, none \| safetensors", section)
    assert "| draw an epoch's order | the aim, 0.3 s | 0.33 |" in section


def test_a_page_without_losses_says_so(outcomes):
    (loaders,) = (outcome for outcome in outcomes if outcome.benchmark == "loaders")
    table = replace(loaders.tables[0], comparisons=(PeerComparison("in", "ours", "theirs", 1.5),))
    assert "In nothing that was measured here." in render([replace(loaders, tables=(table,))])


def test_benchmarks_that_came_later_have_sections_too(outcomes):
    assert "\n## Later\n" in render(outcomes)


def test_every_machine_is_named_once(outcomes):
    page = render(outcomes)
    assert page.count("A processor, 3 cores, 23 GiB, Linux 7.8, Python 3.14.0") == 1
    assert page.count(f"Python {this_machine().python}") == 1


def test_the_page_and_its_plots_are_written(outcomes, tmp_path, capsys):
    source, to = tmp_path / "bench", tmp_path / "docs" / "page.md"
    source.mkdir()
    to.parent.mkdir()
    (sizes,) = (outcome for outcome in outcomes if outcome.benchmark == "chunk_sizes")
    sizes.save(source / "chunk_sizes.json")
    for plot in sizes.plots:
        (source / plot).write_bytes(b"a plot")
    assert main(["--from", str(source), "--to", str(to)]) == 0
    assert to.read_text() == render([load_outcome(source / "chunk_sizes.json")])
    for link in re.findall(r"\]\((images/.*?)\)", to.read_text()):
        assert (to.parent / link).read_bytes() == b"a plot"
    assert "1 benchmarks, 2 plots" in capsys.readouterr().out


def test_nothing_measured_and_what_is_no_outcome_are_said(tmp_path, capsys):
    assert main(["--from", str(tmp_path)]) == 2
    assert "make bench" in capsys.readouterr().err
    (tmp_path / "wrong.json").write_text("{}")
    assert main(["--from", str(tmp_path)]) == 2
    assert "wrong.json is not the outcome of a benchmark" in capsys.readouterr().err


def test_an_outcome_comes_back_from_its_file(outcomes, tmp_path):
    for outcome in outcomes:
        outcome.save(tmp_path / "outcome.json")
        assert load_outcome(tmp_path / "outcome.json") == outcome


def test_a_recorded_command_has_no_place_of_this_machine():
    places = ["--place", "/here", "--json=/there/x.json", "--store", "/elsewhere/store", "--quick", "--samples", "4"]
    command = Recorder("loaders", places).outcome().command
    assert command == "python -m benchmarks.loaders --store STORE --quick --samples 4"


def test_cells_are_shown_as_their_column_says():
    column = Column("rate", ",.1f")
    assert [column.text(cell) for cell in (1234.56, "text", None, True, False)] == ["1,234.6", "text", "", "yes", ""]
    with pytest.raises(ValueError, match="a row of 2"):
        Table("title", (column,), ((1, 2),))


def test_a_section_that_was_not_measured_anew_stays_with_its_losses(outcomes):
    page = render(outcomes)
    (loaders,) = (outcome for outcome in outcomes if outcome.benchmark == "loaders")
    table = replace(loaders.tables[0], comparisons=(PeerComparison("in", "ours", "theirs", 0.5),))
    again = render([replace(loaders, tables=(table,))], page)
    for heading in ("Choosing chunk sizes", "Scale", "Later"):
        assert again.count(f"## {heading}\n") == 1
    lost = again.split("## Where we lose")[1]
    assert "draw an epoch's order" in lost
    assert lost.count("\n| Reading and writing beside the peers |") == 1
    assert render(outcomes, again) == page


def test_a_comparison_that_is_lost_has_its_reason_or_says_that_none_is_known():
    assert "decoder" in reason_of(PeerComparison("H=8, epochs, warm", "ours, flat, codec default", "x (NeMo)", 0.5))
    assert reason_of(PeerComparison("elsewhere", "ours", "theirs", 0.5)) == UNKNOWN
    assert not re.search(r"\d", " ".join(reason["because"] for reason in tomllib.loads(REASONS.read_text())["reason"]))
