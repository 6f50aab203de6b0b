"""The chunk-size benchmark, whole, on a tiny store."""

import csv
import re
import sys

import pytest

import benchmarks
from benchmarks.chunk_sizes import main
from benchmarks.measure import Axes, Setting
from benchmarks.sweep import Effort, ReadCase, Sweep, rivals
from benchmarks.tables import load_outcome
from tests.stores import build_store

AXES = ["--codec", "none", "default", "--chunk-tokens", "8", "20", "--shard-size", "4"]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    place = tmp_path_factory.mktemp("sizes") / "store"
    build_store(place)
    return place


@pytest.fixture(scope="module")
def swept(store, tmp_path_factory):
    """The folder that a sweep over eight settings leaves."""
    out = tmp_path_factory.mktemp("swept")
    place = out / "place"
    place.mkdir()
    arguments = ["--store", str(store), "--place", str(place), "--out", str(out), "--storage-rate", "100"]
    assert main([*arguments, *AXES, "--sweep", "--quick", "--rounds", "1"]) == 0
    assert list(place.iterdir()) == []
    return out


def test_a_sweep_leaves_json_csv_and_plots(swept):
    outcome = load_outcome(swept / "chunk_sizes.json")
    assert outcome.command.startswith("python -m benchmarks.chunk_sizes --store STORE --storage-rate 100 --codec none")
    assert str(swept) not in (swept / "chunk_sizes.json").read_text()
    assert set(outcome.plots) == {path.name for path in swept.glob("*.png")}
    assert all((swept / plot).read_bytes()[:4] == b"\x89PNG" for plot in outcome.plots)


def test_the_csv_has_every_setting_and_every_way_to_read(swept):
    with (swept / "chunk_sizes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 1 * 2
    for row in rows:
        assert all(float(row[f"read_{access}_median"]) > 0 for access in ("sample", "scattered", "span", "layer"))
        limited = row["read_sample_at_100_MB_per_s_median"]
        assert (limited == "") == (row["layers_per_chunk"] != "1")
        assert float(row["write_low"]) <= float(row["write_median"]) <= float(row["write_high"])


def test_a_layer_out_of_a_chunk_of_three_reads_three_times_the_bytes(swept):
    with (swept / "chunk_sizes.csv").open() as file:
        read = {
            row["layers_per_chunk"]: float(row["read_per_wanted_layer"])
            for row in csv.DictReader(file)
            if (row["codec"], row["chunk_tokens"]) == ("none", "8")
        }
    assert 2 < read["3"] / read["1"] <= 3


def test_the_recommendation_is_one_of_the_settings_and_stands_beside_the_best(swept):
    outcome = load_outcome(swept / "chunk_sizes.json")
    settings = Axes(("none", "default"), (8, 20), (4,), (1,)).settings()
    assert outcome.figures["recommended"] in {setting.flags for setting in settings}
    assert outcome.figures["recommended"] in outcome.figures["paragraph"]
    (table,) = (table for table in outcome.tables if table.title.startswith("The recommendation"))
    assert [row[0] for row in table.rows] == [
        "sample at 100 MB/s",
        "sample at 500 MB/s",
        "sample",
        "scattered at 100 MB/s",
        "scattered at 500 MB/s",
        "scattered",
    ]
    for row in table.rows:
        assert {row[1], row[3]} <= {str(setting) for setting in settings}
        assert 0 < float(row[5] or 0) <= 1


def test_without_a_sweep_it_only_recommends(store, tmp_path, capsys):
    arguments = ["--store", str(store), "--place", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main([*arguments, *AXES, "--rounds", "1", "--storage-rate", "1", "--num-samples", "1000000"]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["chunk_sizes.json"]
    printed = capsys.readouterr().out
    assert re.search(r"^    --codec (none|default) --chunk-tokens (8|20) --shard-size 4$", printed, re.MULTILINE)
    assert "bound by storage" in printed
    assert "100% of the objects" in printed
    assert "1,000,000 samples" in printed


def test_without_matplotlib_all_but_the_plots_is_there(store, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "benchmarks.plots", None)
    monkeypatch.delattr(benchmarks, "plots", raising=False)
    arguments = ["--store", str(store), "--place", str(tmp_path), "--out", str(tmp_path / "out"), "--storage-rate", "9"]
    axes = ["--codec", "none", "--chunk-tokens", "8", "--shard-size", "4", "--layers-per-chunk", "1"]
    assert main([*arguments, *axes, "--sweep", "--quick", "--rounds", "1"]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"chunk_sizes.json", "chunk_sizes.csv"}
    assert "dspark-store[plot]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chunk-tokens", "21"], "--chunk-tokens 21 is outside 1 to 20"),
        (["--layers-per-chunk", "1", "2"], "--layers-per-chunk 2 does not divide the 3 layers"),
    ],
)
def test_a_users_mistake_is_one_line(store, tmp_path, capsys, arguments, message):
    assert main(["--store", str(store), "--place", str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_without_a_store_it_says_where_one_comes_from(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([]) == 2
    assert "make demo" in capsys.readouterr().err


def test_a_target_needs_its_chats(capsys):
    with pytest.raises(SystemExit):
        main(["--target", "somewhere"])
    assert "--input-data" in capsys.readouterr().err


def test_a_run_off_names_the_best_and_counts_the_recommended_as_one_of_them(store, tmp_path):
    from benchmarks.samples import stored_samples

    axes = Axes(("none",), (8, 20), (4,), (1,))
    sweep = Sweep(stored_samples(store), axes, tmp_path, 1, Effort(2, 1, 1))
    measured = sweep.run(())
    case = ReadCase("sample")
    fastest = rivals(measured, case)
    assert [measured[setting].reading[case].median for setting in fastest] == sorted(
        (one.reading[case].median for one in measured.values()), reverse=True
    )
    run_off = sweep.run_off(case, Setting("none", 20, 4), fastest, 2)
    assert run_off.ratios[run_off.recommended].median == 1
    assert run_off.share(run_off.recommended) == pytest.approx(
        1 / max(ratio.median for ratio in run_off.ratios.values())
    )
