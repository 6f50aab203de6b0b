"""``dspark-store plot``: a figure of how trainings went."""

import builtins
import json
import sys

import pytest

from dspark_store.cli.main import main

PNG = b"\x89PNG\r\n"


def write_metrics(directory, lines):
    directory.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text, encoding="utf-8")
    return directory


def line(kind, step, **figures):
    return {"kind": kind, "step": step, "loss": 3.0 / step, "tau": 1 + step / 10, **figures}


@pytest.fixture
def draft(tmp_path):
    lines = [line("train", step, **{"accept@0": 0.1, "accept@1": 0.05}) for step in (10, 20)]
    return write_metrics(tmp_path / "draft", [*lines, line("validation", 20, **{"accept@0": 0.25, "accept@1": 0.125})])


@pytest.fixture
def other(tmp_path):
    """A training without validation samples, and with a line of which nothing was to be counted."""
    return write_metrics(tmp_path / "other", [{"kind": "train", "step": 5, "loss": 2.0}, line("train", 10)])


def drawn(figure):
    """Return what the panels of a figure show: by the label of each line its points."""
    return [
        {one.get_label(): list(zip(*(map(float, axis) for axis in one.get_data()), strict=True)) for one in panel.lines}
        for panel in figure.axes
    ]


@pytest.fixture
def figures(monkeypatch):
    from matplotlib.figure import Figure

    saved: list[Figure] = []
    save = Figure.savefig

    def noted(self, *given, **more):
        saved.append(self)
        save(self, *given, **more)

    monkeypatch.setattr(Figure, "savefig", noted)
    return saved


def test_the_curves_are_those_of_the_metrics(draft, other, tmp_path, figures):
    assert main(["plot", str(draft), str(other), "--output", str(tmp_path / "new" / "curves.png")]) == 0
    loss, tau, accepted = drawn(figures[0])
    assert loss[f"{draft}, training"] == [(10, 0.3), (20, 0.15)]
    assert loss[f"{draft}, validation"] == [(20, 0.15)]
    assert loss[f"{other}, training"] == [(5, 2.0), (10, 0.3)]
    assert tau[f"{other}, training"] == [(10, 2.0)]
    assert accepted == {f"{draft}, step 20": [(1, 0.25), (2, 0.125)], f"{other}, step 10": []}


def test_every_training_has_its_name_in_the_legend(tmp_path, monkeypatch, figures):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_metrics(tmp_path / name / "draft", [line("train", 1)])
    write_metrics(tmp_path / "_hidden", [line("train", 1)])
    assert main(["plot", "a/draft", "b/draft", "_hidden"]) == 0
    texts = [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()]
    assert texts == ["a/draft, training", "b/draft, training", "./_hidden, training"]


def test_the_ending_says_the_format_and_nothing_else_is_left(draft, tmp_path, capsys):
    for name, start in (("curves.png", PNG), ("curves.svg", b"<?xml"), ("curves.pdf", b"%PDF")):
        assert main(["plot", str(draft), "--output", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(start)
        assert capsys.readouterr().out == f"written: {tmp_path / name}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.pdf", "curves.png", "curves.svg", "draft"]


@pytest.mark.parametrize("name", ["curves.xyz", "curves", ".png"])
def test_an_unknown_ending_is_refused(draft, tmp_path, capsys, name):
    assert main(["plot", str(draft), "--output", str(tmp_path / "new" / name)]) == 2
    assert f"{name} must end with one of .png, .svg, .pdf" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_places_that_cannot_be_are_one_line(draft, tmp_path, capsys):
    (tmp_path / "file").touch()
    for training, output, message in (
        (draft, tmp_path / "draft.png", "is a directory: name a file"),
        (draft, tmp_path / "file" / "a.png", f"cannot be written: {tmp_path / 'file'} is a file"),
        (tmp_path / "none", tmp_path / "a.png", f"there is no directory {tmp_path / 'none'}"),
        (draft / "metrics.jsonl", tmp_path / "a.png", "there is no directory"),
    ):
        (tmp_path / "draft.png").mkdir(exist_ok=True)
        assert main(["plot", str(training), "--output", str(output)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


def test_a_training_that_only_just_began_has_no_empty_name_in_the_legend(tmp_path, figures):
    young = write_metrics(tmp_path / "young", [{"kind": "validation", "step": 0, "loss": 3.0, "tau": 1.0}])
    assert main(["plot", str(young), "--output", str(tmp_path / "a.png")]) == 0
    assert [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()] == [f"{young}, validation"]


def test_a_directory_without_metrics_is_refused(tmp_path, capsys):
    assert main(["plot", str(tmp_path)]) == 2
    assert "has no metrics.jsonl with lines in it: give the --output-dir of a training" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong", ["{}", "no JSON", "[1]", '{"kind": "train", "step": "1"}', '{"kind": "train", "step": 1, "loss": null}']
)
def test_a_file_of_something_else_is_refused_by_its_line(draft, wrong, capsys):
    with (draft / "metrics.jsonl").open("a") as file:
        file.write(wrong + "\n")
    assert main(["plot", str(draft)]) == 2
    assert f"{draft / 'metrics.jsonl'}:4 is no line of metrics of a training" in capsys.readouterr().err


def test_half_a_line_of_a_running_training_is_left_out(draft, tmp_path):
    with (draft / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tr')
    assert main(["plot", str(draft), "--output", str(tmp_path / "curves.png")]) == 0


def test_without_matplotlib_the_extra_is_named(draft, monkeypatch, capsys):
    found = builtins.__import__

    def without(name, *more, **named):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return found(name, *more, **named)

    monkeypatch.delitem(sys.modules, "dspark_store.training.curves", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["plot", str(draft)]) == 2
    assert "pip install 'dspark-store[plot]'" in capsys.readouterr().err


def test_long_names_of_directories_leave_room_for_the_curves(tmp_path, figures):
    trainings = [tmp_path / (letter * 200) for letter in "ab"]
    for training in trainings:
        write_metrics(training, [line("train", 1), line("train", 2)])
    assert main(["plot", *map(str, trainings), "--output", str(tmp_path / "curves.png")]) == 0
    assert min(panel.get_window_extent().width for panel in figures[0].axes) > 100
