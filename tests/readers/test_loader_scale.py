"""Memory and open files stay within their bounds, however large the store; benchmarks.loader_scale in a small form."""

import gc
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from benchmarks.loader_scale import MIB, measure_files, measure_memory, open_files, write_store
from dspark_store import open_cache
from dspark_store.readers.order import epoch_order
from tests.processes import until

PREFETCH_MIB = 8


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose batches take ten times the bytes that are read ahead: 56 samples of 1.5 MiB."""
    place = tmp_path_factory.mktemp("large")
    write_store(place, shards=7, rows=8, seq_length=256, width=1024, layers=2)
    return place


def test_three_epochs_stay_within_what_is_read_ahead(store: Path) -> None:
    for _ in open_cache(store).read([0]):
        pass  # what the first read of a process takes is not the loader's
    gc.collect()
    peaks = list(measure_memory(store, batch_size=2, prefetch_bytes=PREFETCH_MIB * MIB).values())
    assert max(peaks) < PREFETCH_MIB + 40
    assert peaks[2] < peaks[0] + 10


def test_open_files_stay_under_the_bound_over_many_shards(tmp_path: Path) -> None:
    write_store(tmp_path, shards=100, rows=1, seq_length=4, width=8, layers=1)
    gc.collect()
    before = open_files()
    most = measure_files(tmp_path, open_objects=16)["open_files"]
    assert 8 <= most <= 16

    def all_closed() -> bool:  # by the thread that read last, which may still be at its end
        gc.collect()
        return open_files() <= before

    until(all_closed)


def test_an_epochs_order_takes_a_few_words_a_sample() -> None:
    samples = np.arange(100_000)
    tracemalloc.start()
    order = epoch_order(samples, seed=0, epoch=0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert order.nbytes == 8 * samples.size
    assert peak < 60 * samples.size
