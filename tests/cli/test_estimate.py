"""``dspark-store estimate`` against stores that were really made."""

import json
import os
import signal
from contextlib import closing

import pytest

from dspark_store.cli.main import main
from dspark_store.format.schema import COLUMNS, IDS, MASK
from dspark_store.format.shard import read_tail
from dspark_store.readers.cache import open_cache
from dspark_store.target.batches import padded_batch
from tests.precompute.jobs import precompute
from tests.stores import build_store
from tests.tiny import save_target_dir, tiny_qwen3, write_chats

SETTINGS = ("--device", "cpu", "--batch-size", "2", "--shard-size", "8", "--seq-length", "128")

MANIFEST = {"pad_token_id": 5, "num_hidden_layers": 6, "target_vocab_size": 19}


def counted_bytes(store):
    """Return the bytes of all chunks and of the target's tables in a store, those of one file once."""
    cache = open_cache(store)
    found = {path.stat().st_ino: path.stat().st_size for path in (store / "target").rglob("c.*")}
    for column in COLUMNS:
        grid = cache.schema.tokens if column in (IDS, MASK) else cache.schema.states
        for path in (store / column).glob("c.*"):
            with closing(cache.storage.open(f"{column}/{path.name}")) as reader:
                found[path.stat().st_ino] = int(read_tail(reader, grid).bounds.max())
    return sum(found.values())


def directory_bytes(store):
    """Return the bytes of all files below a store, each file once."""
    files = [path.stat() for path in store.rglob("*") if path.is_file()]
    return sum({stat.st_ino: stat.st_size for stat in files}.values())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A target without a tied head, forty chats, and stores of them by codec and dtype."""
    place = tmp_path_factory.mktemp("estimate")
    save_target_dir(place / "target", tiny_qwen3(vocab_size=4096))
    write_chats(place / "chats.jsonl", 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        for codec, dtype in (("default", "bf16"), ("none", "fp32")):
            options = (*SETTINGS, "--codec", codec, "--dtype", dtype)
            precompute(place / "target", place / "chats.jsonl", place / f"{codec}-{dtype}", *options)
    return place


def estimate(place, capsys, *options, data=True):
    source = (str(place / "chats.jsonl"), "--target-model", str(place / "target"), *SETTINGS) if data else ()
    capsys.readouterr()
    assert main(["estimate", *source, "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("codec", "dtype"), [("default", "bf16"), ("none", "fp32")])
def test_some_rows_foretell_the_store_within_5_percent(place, capsys, codec, dtype):
    found = estimate(place, capsys, "--codec", codec, "--dtype", dtype, "--measure", "10")
    stored = counted_bytes(place / f"{codec}-{dtype}")
    assert found["measured_rows"] == 10
    assert found["store_bytes"]["expected"] == pytest.approx(stored, rel=0.05)
    assert found["store_bytes"]["least"] * 0.99 < stored < found["store_bytes"]["most"] * 1.01


def test_all_rows_foretell_every_byte_of_columns_and_tables(place, capsys):
    found = estimate(place, capsys, "--measure", "1000")
    store = place / "default-bf16"
    assert found["measured_rows"] == found["samples"] == 40
    assert {found["store_bytes"][end] for end in ("least", "expected", "most")} == {counted_bytes(store)}
    assert directory_bytes(store) - counted_bytes(store) < 10_000 * 5  # what is not counted, of 5 shards
    parts = {(part["part"], part["layer_id"]): part["stored_bytes"]["expected"] for part in found["parts"]}
    tables = sum(path.stat().st_size for path in (store / "target").rglob("c.*"))
    assert parts["target", None] == tables
    assert sum(part["share"] for part in found["parts"]) == pytest.approx(1)


def test_samples_that_are_cut_or_not_supervised_are_counted(place, capsys):
    found = estimate(place, capsys, "--measure", "0", "--seq-length", "48")
    assert (found["cut"], found["perhaps_cut"]) == (33, 0)
    assert found["unsupervised_samples"] == 0
    store = estimate(place, capsys, "--store", str(place / "default-bf16"), "--measure", "0", data=False)
    assert (store["cut"], store["perhaps_cut"], store["unsupervised_samples"]) == (0, 14, 0)


def test_a_precompute_prints_the_same_estimate(place, capsys, tmp_path):
    words = ["--input-data", str(place / "chats.jsonl"), "--target-model", str(place / "target"), *SETTINGS]
    assert main(["estimate", *words, "--measure", "0"]) == 0
    printed = capsys.readouterr().out
    assert main(["precompute", *words, "--output-dir", str(tmp_path / "store"), "--estimate"]) == 0
    kept = [
        [line for line in text.splitlines() if "disk free" not in line] for text in (printed, capsys.readouterr().out)
    ]
    assert kept[0] == kept[1]


def test_every_codec_and_dtype_is_told_and_each_is_what_it_would_be_alone(place, capsys):
    found = estimate(place, capsys, "--measure", "10")
    totals = {(one["codec"], one["dtype"]): one["store_bytes"]["expected"] for one in found["variants"]}
    assert len(totals) == 20
    assert totals["none", "fp32"] == pytest.approx(counted_bytes(place / "none-fp32"), rel=0.05)
    assert totals["default", "bf16"] == found["store_bytes"]["expected"]


def test_a_store_foretells_itself_and_what_it_would_be_otherwise(place, capsys):
    store = place / "default-bf16"
    own = estimate(place, capsys, "--store", str(store), "--measure", "10", data=False)
    assert own["store_bytes"]["expected"] == pytest.approx(counted_bytes(store), rel=0.05)
    assert own["tokens"] == estimate(place, capsys, "--measure", "0")["tokens"]
    assert own["seconds"] > 0
    one = [str(own["parts"][2]["layer_id"])]
    fewer = estimate(place, capsys, "--store", str(store), "--target-layer-ids", *one, "--codec", "fast", data=False)
    assert [part["layer_id"] for part in fewer["parts"]] == [None, None, int(one[0]), None, None]
    assert fewer["codec"] == "fast"


def test_a_growing_store_is_estimated_whole(tmp_path, capsys):
    whole = build_store(tmp_path / "whole", fields={"manifest": MANIFEST})
    build_store(tmp_path / "growing", without_shards=(1,), fields={"manifest": MANIFEST})
    found = estimate(tmp_path, capsys, "--store", str(tmp_path / "growing"), data=False)
    assert (found["samples"], found["measured_rows"]) == (7, 4)
    assert found["store_bytes"]["expected"] == pytest.approx(counted_bytes(whole.path), rel=0.02)


def test_one_row_of_many_tells_no_range(place, capsys):
    assert estimate(place, capsys, "--measure", "1")["store_bytes"]["most"] is None
    assert main(["estimate", "--store", str(place / "default-bf16"), "--measure", "1"]) == 0
    assert "(range unknown)" in capsys.readouterr().out


def test_a_store_without_a_manifest_is_refused(tmp_path, capsys):
    assert main(["estimate", "--store", str(build_store(tmp_path / "store").path)]) == 2
    assert "its manifest does not have num_hidden_layers" in capsys.readouterr().err


def test_a_store_without_tables_is_estimated_without(tmp_path, capsys):
    store = build_store(tmp_path / "store", weights=False, fields={"manifest": MANIFEST})
    found = estimate(tmp_path, capsys, "--store", str(store.path), data=False)
    assert found["parts"][-1]["stored_bytes"]["expected"] == 0


@pytest.mark.parametrize("tied", [False, True])
def test_tables_of_a_store_are_counted_as_they_stand_on_the_disk(tmp_path, capsys, tied):
    """Also where no facts of the head say whether it is the embedding."""
    store = build_store(tmp_path / "store", tied=tied, fields={"manifest": MANIFEST})
    found = estimate(tmp_path, capsys, "--store", str(store.path), data=False)
    files = {path.stat().st_ino: path.stat().st_size for path in (store.path / "target").rglob("c.*")}
    assert found["parts"][-1]["stored_bytes"]["expected"] == sum(files.values())


def test_without_a_measurement_the_target_is_not_loaded_and_the_answer_says_so(place, capsys, monkeypatch):
    monkeypatch.setattr("dspark_store.inspection.estimate.measurement.JobTarget", None)
    found = estimate(place, capsys, "--measure", "0")
    assert found["basis"] == "a table of ratios: nothing was measured"
    assert (found["measured_rows"], found["seconds"]) == (0, None)
    assert found["store_bytes"]["least"] < found["store_bytes"]["expected"] < found["store_bytes"]["most"]
    assert estimate(place, capsys, "--measure", "0", "--tokens-per-second", "10")["seconds"] == found["tokens"] / 10


def test_settings_may_stand_in_a_file(place, tmp_path, capsys):
    settings = tmp_path / "precompute.yaml"
    lines = (f"target_model: {place / 'target'}", f"input_data: {place / 'chats.jsonl'}", "seq_length: 128")
    settings.write_text("\n".join((*lines, "batch_size: 2", "shard_size: 8", "device: cpu", "codec: none")))
    found = estimate(place, capsys, "-c", str(settings), "--measure", "2", data=False)
    assert (found["codec"], found["samples"]) == ("none", 40)


def test_the_text_tells_parts_codecs_and_other_layouts(place, capsys):
    data, target = str(place / "chats.jsonl"), str(place / "target")
    assert main(["estimate", data, "--target-model", target, *SETTINGS, "--measure", "4"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "basis              4 rows taken at random and run through the target on cpu\n",
        "\nlayer ",
        "\ndense ",
    ):
        assert text in shown
    assert shown.count(" of ragged bf16 rows of ") == 4  # the store, and three other layouts
    for text in ("padded safetensors", "ragged rows, the last state once", "tokens/s, measured on these rows"):
        assert text in shown


def test_a_process_that_is_told_to_end_does_so_between_two_batches(place, capsys, monkeypatch):
    chats, target = str(place / "chats.jsonl"), str(place / "target")
    batches = []

    def first_batch(*given):
        batches.append(given)
        signal.raise_signal(signal.SIGTERM)
        return padded_batch(*given)

    monkeypatch.setattr("dspark_store.inspection.estimate.measurement.padded_batch", first_batch)
    assert main(["estimate", chats, "--target-model", target, *SETTINGS]) == 143
    assert capsys.readouterr().err.splitlines()[-1].startswith("stopped: ")
    assert len(batches) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["x", "--input-data", "y", "--target-model", "z"], "the data is given twice"),
        (["--store", "s", "--dtype", "fp32"], "--dtype cannot be given with --store"),
        (["--store", "s", "data"], "data cannot be given with --store"),
        (["x", "--measure", "-1"], "measure must be >= 0, got -1"),
        (["x"], "required but not given: --target-model"),
        ([], "required but not given: --target-model, --input-data"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(capsys, options, message):
    assert main(["estimate", *options]) == 2
    assert message in capsys.readouterr().err
