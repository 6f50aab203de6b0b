"""The measurement of what writing costs, in a small form: it runs the same batches, and writes all states."""

import pytest
import torch

from benchmarks.captures import CaptureWork, run_copies, run_forwards, run_writing
from benchmarks.writing_cost import LAYERS, LENGTH, CaptureCase, StandIn, calibrated, idle_table, measure_cost
from dspark_store import open_cache, verify_store
from dspark_store.writers.publish import complete_store

CASE = CaptureCase(width=64, codec="default", samples=8, products=1)


class Counted(StandIn):
    """The stand-in, which also keeps the shapes of its batches."""

    def __init__(self):
        super().__init__(CASE.width, CASE.products)
        self.shapes = []

    def __call__(self, ids, attention):
        self.shapes.append(tuple(ids.shape))
        return super().__call__(ids, attention)


@pytest.fixture(scope="module")
def workload(tmp_path_factory) -> CaptureWork:
    return CASE.workload(tmp_path_factory.mktemp("cost") / "tokens")


def test_every_kind_of_run_sees_the_same_batches(workload, tmp_path):
    shapes = []
    for run in (run_forwards, run_copies, run_writing):
        capture = Counted()
        run(workload.copied(tmp_path / run.__name__), capture)
        shapes.append(capture.shapes)
    assert shapes[0] == shapes[1] == shapes[2]
    assert sum(rows * length for rows, length in shapes[0]) == workload.tokens == CASE.samples * LENGTH


def test_a_run_with_writing_leaves_all_states_of_a_sound_store(workload, tmp_path):
    target = workload.copied(tmp_path / "states")
    stored = run_writing(target, CASE.stand_in())
    complete_store(target.storage, target.record)
    cache = open_cache(tmp_path / "states")
    assert verify_store(cache) == []
    objects = [path.stat().st_size for path in (tmp_path / "states").glob("target_*hidden_states/c.*")]
    assert len(objects) == LAYERS + 1
    assert stored == sum(objects)


def test_the_cost_is_a_ratio_of_pairs_and_copies_are_removed(tmp_path):
    threads = torch.get_num_threads()
    try:
        cost = measure_cost(CASE, tmp_path, pairs=2)
    finally:
        torch.set_num_threads(threads)
    assert len(cost.clock) == len(cost.processor) == 2
    assert min(*cost.clock, *cost.processor) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]


def test_a_target_that_sleeps_is_measured_with_each_codec_and_shard_size(tmp_path):
    threads = torch.get_num_threads()
    try:
        table = idle_table(tmp_path, pairs=1, rate=1e12, samples=20)
    finally:
        torch.set_num_threads(threads)
    assert len(table.rows) == 6
    assert {comparison.ours for comparison in table.comparisons} == {
        f"R={size}, codec {codec}" for size in (16, 64) for codec in ("none", "default")
    }
    assert not (tmp_path / "states").exists()


def test_calibration_takes_more_products_for_a_slower_target():
    fast, slow = (calibrated(CASE, rate).products for rate in (1e9, 1e4))
    assert fast == 1
    assert slow > 10
