"""What is told of a store: complete, growing, of one layer or of a blend, sound or damaged."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest

from benchmarks.info import write_growing_index
from benchmarks.loader_scale import write_index
from dspark_store import open_cache
from dspark_store.format.schema import COLUMNS
from dspark_store.format.storage import LocalStorage
from dspark_store.inspection import sample_survey
from dspark_store.inspection.summary import ShardRun, Summary, missing_runs, summarise
from dspark_store.precompute.report import stored_bytes
from dspark_store.writers.lock import LOCK_KEY, StoreLock
from dspark_store.writers.process import ProcessName
from tests.processes import run_python
from tests.stores import RAGGED, Shape, build_store, flip

TOKENS = sum(RAGGED)
VECTOR = 8 * 2
MANIFEST = {"pad_token_id": 5, "num_hidden_layers": 6}


def sizes(summary):
    return {column.name: column for column in summary.columns}


def test_runs_have_no_hole():
    assert missing_runs(11, [3, 4, 5, 6, 8]) == (ShardRun(0, 2), ShardRun(7, 7), ShardRun(9, 10))
    assert missing_runs(2, [0, 1, 5]) == missing_runs(0, []) == ()
    assert missing_runs(2**62, [1]) == (ShardRun(0, 0), ShardRun(2, 2**62 - 1))


def test_a_complete_store_is_summed_up_exactly(tmp_path):
    store = build_store(tmp_path / "s")
    summary = summarise(store.storage)
    assert (summary.complete, summary.damage, summary.shards.missing, summary.to_come) == (True, (), (), None)
    samples = summary.samples
    supervised = sum(int(sample.mask.sum()) for sample in store.samples)
    assert (samples.count, samples.counted, samples.tokens, samples.supervised) == (7, 7, TOKENS, supervised)
    assert (samples.unsupervised_samples, samples.nonfinite) == (1, 0)
    assert samples.lengths is not None
    assert samples.lengths.at_limit == 2
    column = sizes(summary)
    assert column["input_ids"].logical_bytes == TOKENS * 4
    assert column["loss_mask"].logical_bytes == TOKENS
    assert column["target_hidden_states"].logical_bytes == TOKENS * 2 * VECTOR
    assert column["target_hidden_states"].padded_bytes == 7 * 20 * 2 * VECTOR
    assert column["target_last_hidden_states"].logical_bytes == TOKENS * VECTOR


def test_the_layer_that_is_the_last_hidden_state_counts_once_as_on_disk(tmp_path):
    store = build_store(tmp_path / "s")
    summary = summarise(store.storage)
    assert [layer.shared for layer in summary.layers] == [False, False, True, False]
    files = [path.stat() for name in sizes(summary) for path in (store.path / name).glob("c.*")]
    on_disk = sum({found.st_ino: found.st_size for found in files}.values())
    assert sum(column.stored_bytes for column in summary.columns) == on_disk
    assert summary.comparison is not None
    assert summary.comparison.stored_bytes == on_disk == stored_bytes(open_cache(store.path))


def test_what_is_saved_is_against_all_vectors_padded_and_ragged(tmp_path):
    compared = summarise(build_store(tmp_path / "s").storage).comparison
    assert compared is not None
    assert compared.padded_bytes == 7 * 20 * (4 * VECTOR + 16)
    assert compared.ragged_bytes == TOKENS * (4 * VECTOR + 5)
    assert compared.stored_of_ragged_rows == compared.stored_bytes / compared.ragged_bytes
    assert compared.padded_of_ragged_rows == compared.padded_bytes / compared.ragged_bytes


def test_a_growing_store_tells_what_is_missing_and_how_much_is_to_come(tmp_path):
    store = build_store(tmp_path / "s", without_shards=(1,))
    summary = summarise(store.storage)
    assert (summary.phase, summary.shards.total, summary.shards.tokens, summary.shards.states) == ("states", 3, 3, 2)
    assert summary.shards.missing == (ShardRun(1, 1),)
    assert (summary.samples.tokens, summary.samples.nonfinite) == (TOKENS, None)
    missing = sum(RAGGED[3:6])
    column = sizes(summary)
    assert column["target_last_hidden_states"].logical_bytes == (TOKENS - missing) * VECTOR
    assert column["input_ids"].logical_bytes == TOKENS * 4
    assert summary.to_come is not None
    stored = column["target_hidden_states"].stored_bytes + column["target_last_hidden_states"].stored_bytes
    assert summary.to_come.tokens == missing
    assert summary.to_come.least_bytes == summary.to_come.most_bytes == round(stored / (TOKENS - missing) * missing)
    assert summary.comparison is not None
    assert (summary.comparison.samples, summary.comparison.tokens) == (4, TOKENS - missing)


def test_before_the_first_shard_the_size_to_come_is_a_range(tmp_path):
    store = build_store(tmp_path / "s", without_shards=(0, 1, 2), fields={"manifest": MANIFEST})
    summary = summarise(store.storage)
    assert summary.comparison is None
    assert summary.to_come is not None
    assert 0 < summary.to_come.least_bytes < summary.to_come.most_bytes < TOKENS * 3 * VECTOR
    assert summary.shards.missing == (ShardRun(0, 2),)


@pytest.mark.parametrize("lengths", [RAGGED, (20,) * 40, ()])
def test_a_store_in_its_token_phase_tells_what_it_has_so_far(tmp_path, lengths):
    summary = summarise(build_store(tmp_path / "s", until="tokens", lengths=lengths).storage)
    assert (summary.phase, summary.shards.total, summary.damage) == ("tokens", None, ())
    assert summary.shards.tokens == -(-len(lengths) // 3)
    assert (summary.samples.count, summary.samples.tokens) == (len(lengths), sum(lengths))
    assert summary.samples.counted == (10 if len(lengths) > 12 else len(lengths))
    assert sizes(summary)["input_ids"].logical_bytes == 4 * sum(lengths)


def test_where_not_all_rows_are_read_sizes_are_extrapolated(tmp_path, monkeypatch):
    store = build_store(tmp_path / "s", until="states", lengths=(20,) * 30, codec="none")
    exact = summarise(store.storage)
    monkeypatch.setattr(sample_survey, "MOST_ROWS", 4)
    rough = summarise(store.storage)
    assert (rough.shards.states, rough.shards.counted_states) == (10, 4)
    for one, other in zip(rough.columns, exact.columns, strict=True):
        assert one.logical_bytes == other.logical_bytes
        assert one.stored_bytes == pytest.approx(other.stored_bytes, rel=0.02)


def test_non_finite_samples_and_equality_classes_are_told(tmp_path):
    producers: tuple[dict[str, str], ...] = ({"equality_class": "cpu exact"}, {"equality_class": "cuda exact"}, {})
    summary = summarise(build_store(tmp_path / "s", spoiled=2, fields={"producers": producers}).storage)
    assert summary.samples.nonfinite == 1
    assert summary.equality_classes == ("cpu exact", "cuda exact")
    assert "captured in several equality classes: cpu exact, cuda exact" in summary.notes


def test_a_living_writer_is_named_and_a_dead_one_is_stale(tmp_path):
    store = build_store(tmp_path / "s", until="states")
    with StoreLock(store.storage):
        writer = summarise(store.storage).writer
        assert writer is not None
        assert (writer.pid, writer.stale) == (os.getpid(), False)
    assert summarise(store.storage).writer is None
    gone = replace(ProcessName.own(), started="0")
    store.storage.put(LOCK_KEY, gone.to_json().encode())
    writer = summarise(store.storage).writer
    assert writer is not None
    assert (writer.taken, writer.stale) == (None, True)
    before = sorted(store.path.iterdir())
    summarise(store.storage)
    assert sorted(store.path.iterdir()) == before


@pytest.mark.parametrize(
    ("place", "named"),
    [
        ("index/length/c.0", "index/length"),
        ("index/supervised/c.0", "index/supervised"),
        ("index/status/c.0", "index/status"),
        ("index/objects/c.0.0.0", "index/objects"),
        ("input_ids/zarr.json", "zarr.json"),
    ],
)
@pytest.mark.parametrize("gone", [False, True])
def test_damage_is_told_and_the_rest_too(tmp_path, place, named, gone):
    store = build_store(tmp_path / "s")
    sound = summarise(store.storage)
    if gone:
        (store.path / place).unlink()
    else:
        flip(store.path / place, 2)
    summary = summarise(store.storage)
    assert [named in line for line in summary.damage] == [True]
    assert [column.stored_bytes for column in summary.columns] == [column.stored_bytes for column in sound.columns]
    known = {
        "length": summary.samples.tokens,
        "supervised": summary.samples.supervised,
        "status": summary.samples.nonfinite,
    }
    unknown = {"index/length": {"length", "supervised"}, "index/supervised": {"supervised"}, "index/status": {"status"}}
    assert {name for name, value in known.items() if value is None} == unknown.get(named, set())


def test_metadata_that_a_living_writer_is_replacing_is_no_damage(tmp_path):
    store = build_store(tmp_path / "s", until="states")
    flip(store.path / "input_ids/zarr.json", 2)
    with StoreLock(store.storage):
        summary = summarise(store.storage)
    assert summary.damage == ()
    assert ["changing its metadata" in note for note in summary.notes] == [True]
    assert len(summarise(store.storage).damage) == 1


def test_a_store_that_grows_meanwhile_is_never_called_damaged(tmp_path):
    place = tmp_path / "s"
    with ThreadPoolExecutor(1) as pool:
        built = pool.submit(build_store, place, lengths=(9, 20, 3) * 40)
        seen: list[Summary] = []
        while not built.done():
            if (place / "zarr.json").exists():
                seen.append(summarise(LocalStorage(place)))
        seen.append(summarise(built.result().storage))
    assert {summary.phase for summary in seen} >= {"states", "complete"}
    assert {line for summary in seen for line in summary.damage} == set()
    assert [summary.shards.states for summary in seen] == sorted(summary.shards.states for summary in seen)


def test_everything_that_is_told_is_json(tmp_path):
    summary = summarise(build_store(tmp_path / "s", until="states", shape=Shape(layer_ids=(0,))).storage)
    assert json.loads(json.dumps(asdict(summary)))["shards"]["states"] == 3


WATCHED = """
import os, sys
touched = []
def watch(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], (str, os.PathLike)):
        touched.append(os.path.relpath(arguments[0], sys.argv[1]))
sys.addaudithook(watch)
from dspark_store.cli.main import main
assert main(["info", sys.argv[1]]) == 0
assert "torch" not in sys.modules
print(*("touched " + path for path in touched), sep="\\n")
"""


def touched(place):
    """Run the command in a process of its own; return the paths in the store that it opened or listed."""
    ran = run_python("-c", WATCHED, place, check=True)
    paths = [line.removeprefix("touched ") for line in ran.stdout.splitlines() if line.startswith("touched ")]
    return [path for path in paths if not path.startswith("..")]


@pytest.mark.parametrize("until", ["tokens", "states", "complete"])
def test_no_state_is_opened_and_torch_not_imported(tmp_path, until):
    paths = touched(build_store(tmp_path / "s", until=until).path)
    assert "zarr.json" in paths
    states = [path for path in paths if path.startswith("target_") and "/" in path]
    assert {path.rpartition("/")[2] for path in states} == {"zarr.json"}
    assert any(path.startswith("ledger/") for path in paths)
    ids = [path for path in paths if path.startswith(("input_ids/c.", "loss_mask/c."))]
    assert bool(ids) == (until == "tokens")


@pytest.mark.parametrize("write", [write_index, write_growing_index])
def test_a_million_samples_in_4000_shards_open_only_metadata_index_and_ledger(tmp_path, write):
    write(tmp_path)
    paths = touched(tmp_path)
    objects = [path for path in paths if not path.endswith("zarr.json") and path not in COLUMNS]
    rows = [path for path in objects if path.startswith("ledger/") and "/c." in path]
    assert len(rows) == (0 if write is write_index else 4000 + 3960)
    assert {path.split("/")[0] for path in objects} <= {"index", "ledger", ".writer.lock", "."}
    assert len(set(objects) - set(rows)) < 30
