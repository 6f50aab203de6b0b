"""Every fault that is planted into a store is found and named, good stores have none, and clusters agree."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dspark_store.format.damage import Part, Problem
from dspark_store.format.metadata import COPY_KEY, write_metadata
from dspark_store.format.schema import LAST, LAYERS
from dspark_store.format.storage import LocalStorage
from dspark_store.inspection.shardwise import Workers
from dspark_store.inspection.verification import Verification, problem_line, ranges_text, verify
from dspark_store.progress import Unseen, progress_shown_by
from tests.crash.damage import kind_of
from tests.inspection.faults import SHAPES, Fault, FaultKind, build_victims, copy_store, plant
from tests.readers.test_foreign import rewrite
from tests.stores import Shape, build_store, flip

CODECS = ("none", "fast", "default", "dense")
DTYPES = ("bf16", "fp16", "fp32")
GOOD = {
    **{f"{codec} {dtype}": {"codec": codec, "dtype": dtype} for codec in CODECS for dtype in DTYPES},
    **SHAPES,
    "one sample": {"lengths": (20,)},
    "one sample a shard": {"shape": Shape(shard_size=1), "lengths": (3, 20)},
    "no weights": {"weights": False},
    "tokens": {"until": "tokens", "sources": ("a", "b")},
    "states": {"until": "states", "without_shards": (1,)},
    "all states": {"until": "states"},
}


@pytest.fixture(scope="module")
def victims(tmp_path_factory):
    return build_victims(tmp_path_factory.mktemp("victims"), [name for name in SHAPES if name != "two weight chunks"])


def names(fault: Fault, problem: Problem) -> bool:
    """Tell whether a problem names what a fault has hit: the object, the array that it is of, or the shard's row."""
    if problem.key in fault.keys:
        return True
    if kind_of(problem.key) in {kind_of(key) for key in fault.keys} and problem.shard is None:
        return True
    return fault.kind is FaultKind.EDITED_INDEX and problem.shard in fault.shards


def check_faults(victims, folder, count, seed):
    kinds = list(FaultKind)
    exact = 0
    for number in range(count):
        kind, victim = kinds[number % len(kinds)], victims[number // len(kinds) % len(victims)]
        root = copy_store(victim.path, folder / "damaged", links=number % 2 == 0)
        fault = plant(root, kind, seed * count + number, victim.others)
        problems = verify(LocalStorage(root), workers=Workers(1)).problems
        assert problems, f"{victim.name}: {fault.what} was not found"
        assert any(names(fault, problem) for problem in problems), (victim.name, fault, problems)
        exact += any(problem.key in fault.keys for problem in problems)
        shutil.rmtree(root)
    return exact


def test_every_fault_is_found_and_named(victims, tmp_path):
    assert check_faults(victims, tmp_path, 120, seed=0) >= 115


@pytest.mark.storm
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_five_hundred_faults_are_found_and_named(tmp_path, seed):
    assert check_faults(build_victims(tmp_path / "victims"), tmp_path, 504, seed) >= 490


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("quick", [False, True])
def test_a_good_store_has_no_problem(name, quick, tmp_path):
    store = build_store(tmp_path / "store", **GOOD[name])
    found = verify(store.storage, quick=quick)
    assert found.problems == ()
    assert found.samples == len(store.samples)


def test_a_store_with_a_rewritten_column_has_no_problem(tmp_path):
    store = build_store(tmp_path / "store", spoiled=2)
    rewrite(store, LAYERS, (1, 8, 8))
    assert verify(store.storage).problems == ()
    rewrite(store, "input_ids", (2, 5))
    assert verify(store.storage).problems == ()


def test_damage_of_a_rewritten_column_names_its_sample(tmp_path):
    store = build_store(tmp_path / "store")
    directory = rewrite(store, LAST, (1, 20, 8))
    (directory / "c" / "4" / "0" / "0").unlink()
    (problem,) = verify(store.storage).problems
    assert (problem.part, problem.key, problem.shard, problem.samples) == (Part.STATES, LAST, 1, (4,))


def test_a_quick_check_sees_sizes_and_trailers_and_no_chunk(tmp_path):
    store = build_store(tmp_path / "store", codec="none")
    flip(store.path / LAST / "c.1.0.0", 40)
    assert verify(store.storage, quick=True).problems == ()
    os.truncate(store.path / LAST / "c.1.0.0", 300)
    (last, _layer) = verify(store.storage, quick=True).problems[::-1]
    assert last.key == f"{LAST}/c.1.0.0"
    assert last.message.startswith("has 300 bytes, the ledger says ")


def test_what_is_hit_is_what_cannot_be_read(tmp_path):
    store = build_store(tmp_path / "store", codec="none")
    flip(store.path / LAYERS / "c.1.0.0", 40)
    found = verify(store.storage)
    (problem,) = found.problems
    assert (problem.key, problem.shard, problem.samples) == (f"{LAYERS}/c.1.0.0", 1, (3,))
    assert found.hit == {3}


def test_all_faults_are_listed_and_in_order(tmp_path):
    store = build_store(tmp_path / "store", codec="none", shared_last=False)
    flip(store.path / LAST / "c.2.0.0", 40)
    flip(store.path / LAYERS / "c.0.0.1", 40)
    (store.path / "ledger/tokens/c.1.0.0").unlink()
    (store.path / "index/zarr.json").write_text("{}")
    keys = [problem.key for problem in verify(store.storage).problems]
    assert keys == ["index/zarr.json", f"{LAYERS}/c.0.0.1", "ledger/tokens/c.1.0.0", f"{LAST}/c.2.0.0"]


def test_a_bit_in_a_shared_object_is_a_problem_of_both_of_its_places(tmp_path):
    store = build_store(tmp_path / "store", codec="none")
    flip(store.path / LAST / "c.0.0.0", 140)
    problems = verify(store.storage).problems
    assert [(problem.key, problem.samples) for problem in problems] == [
        (f"{LAYERS}/c.0.0.2", (1,)),
        (f"{LAST}/c.0.0.0", (1,)),
    ]


def test_a_copy_in_the_place_of_a_link_is_read_too(tmp_path):
    store = build_store(tmp_path / "store", codec="none")
    root = copy_store(store.path, tmp_path / "copy", links=False)
    flip(root / LAYERS / "c.0.0.2", 40)
    (problem,) = verify(LocalStorage(root)).problems
    assert problem.key == f"{LAYERS}/c.0.0.2"


def test_what_living_writers_have_on_the_disk_is_no_problem(tmp_path):
    store = build_store(tmp_path / "store", until="states", without_shards=(1,))
    (store.path / LAST / ".c.1.0.0.0123456789abcdef.tmp").write_bytes(b"half")
    shutil.copy(store.path / LAYERS / "c.0.0.0", store.path / LAYERS / "c.1.0.0")  # no ledger row yet
    assert verify(store.storage).problems == ()


@pytest.mark.parametrize("key", ["ledger/states/c.7.0.0", "input_ids/c.3.0", f"{LAYERS}/c.0.0.3", f"{LAST}/notes.txt"])
def test_an_object_that_belongs_to_nothing_is_a_stray(key, tmp_path):
    store = build_store(tmp_path / "store")
    (store.path / key).write_bytes(b"what is this")
    (problem,) = verify(store.storage).problems
    assert (problem.part, problem.key) == (Part.STRAY, key)


def test_the_object_is_wrong_when_the_ledger_and_the_table_agree(tmp_path):
    store = build_store(tmp_path / "store")
    other = build_store(tmp_path / "other", target=1)
    shutil.copy(other.path / LAYERS / "c.1.0.0", store.path / LAYERS / "c.1.0.0")
    (problem,) = verify(store.storage).problems
    assert (problem.part, problem.key, problem.samples) == (Part.STATES, f"{LAYERS}/c.1.0.0", (3, 4, 5))


def test_a_root_of_another_run_is_told_from_a_store_of_another_run(tmp_path):
    store, other = build_store(tmp_path / "store"), build_store(tmp_path / "other", corpus=1, target=1)
    shutil.copy(other.path / "zarr.json", store.path / "zarr.json")
    (root,) = [problem for problem in verify(store.storage).problems if problem.key == "zarr.json"]
    assert root.part is Part.ROOT
    assert "of another run" in root.message


@pytest.mark.parametrize("text", [None, b"", b"{}"])
def test_a_copy_of_the_root_that_is_gone_or_another_is_a_problem(text, tmp_path):
    store = build_store(tmp_path / "store")
    (store.path / COPY_KEY).unlink()
    if text is not None:
        (store.path / COPY_KEY).write_bytes(text)
    (problem,) = verify(store.storage).problems
    assert (problem.part, problem.key) == (Part.ROOT, COPY_KEY)


def test_a_store_from_before_there_were_copies_has_no_problem(tmp_path):
    old = Path(shutil.copytree(Path(__file__).parents[1] / "golden/v1/fp32-none", tmp_path / "old"))
    assert not (old / COPY_KEY).exists()
    assert verify(LocalStorage(old)).problems == ()


def test_the_copy_of_a_growing_store_may_be_ahead_of_its_root(tmp_path):
    store = build_store(tmp_path / "store", until="states")
    before = store.storage.read("zarr.json")
    write_metadata(store.storage, replace(store.record, producers=({"host": "next"},)))
    store.storage.put("zarr.json", before)
    assert verify(store.storage).problems == ()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"zarr_format": 3, "node_type": "group", "attributes": {}}'])
def test_a_root_that_is_no_root_is_a_problem(text, tmp_path):
    store = build_store(tmp_path / "store")
    (store.path / "zarr.json").write_text(text)
    (problem,) = verify(store.storage).problems
    assert (problem.part, problem.key) == (Part.ROOT, "zarr.json")


def test_a_root_that_is_gone_is_a_problem_and_an_empty_folder_is_no_store(tmp_path):
    store = build_store(tmp_path / "store")
    (store.path / "zarr.json").unlink()
    (problem,) = verify(store.storage).problems
    assert (problem.part, problem.message) == (Part.ROOT, "is missing")
    with pytest.raises(FileNotFoundError, match="manifest not found"):
        verify(LocalStorage(tmp_path))


def test_progress_is_told_from_the_first_shard_to_the_last(tmp_path):
    seen = []

    class Watch(Unseen):
        def reach(self, units, note):
            seen.append((units, note()))

    with progress_shown_by(Watch):
        verify(build_store(tmp_path / "store").storage, workers=Workers(1))
    assert [units for units, _ in seen] == [0, 1, 2, 3]
    assert all(note.endswith("B/s") for _, note in seen[1:])


def facts(found: Verification) -> Verification:
    return replace(found, seconds=0)


def test_a_cluster_finds_what_threads_find(cluster, victims, tmp_path):
    for number, victim in enumerate(victims[:2]):
        root = copy_store(victim.path, tmp_path / str(number))
        for damage in (None, FaultKind.FLIP, FaultKind.FOREIGN, FaultKind.STALE_ROW):
            if damage is not None:  # in the same place: workers must not go by what they saw before
                plant(root, damage, number, victim.others)
            here = verify(LocalStorage(root), workers=Workers(2))
            there = verify(LocalStorage(root), workers=Workers(scheduler=cluster.scheduler_address))
            assert facts(here) == facts(there)
            assert bool(here.problems) == (damage is not None)


def test_samples_are_told_as_ranges():
    assert ranges_text([3, 4, 5, 9]) == "3-5, 9"
    assert ranges_text([1, 3, 5, 7, 8], most=2) == "1, 3 and 3 more"
    assert ranges_text([]) == ""
    assert problem_line(Problem(Part.STATES, "a/c.0", 0, (2,), "is bad")) == "a/c.0: is bad (sample 2)"
    assert problem_line(Problem(Part.INDEX, "a/c.0", None, (), "is bad")) == "a/c.0: is bad"
