"""The same statistics on a dask cluster of two workers as in threads, whatever becomes of a worker."""

import json
import os
import signal

import pytest

from dspark_store.cli.main import main
from dspark_store.inspection.shardwise import Workers
from dspark_store.inspection.stats.survey import Rules, measure_store
from dspark_store.progress import Unseen, progress_shown_by
from dspark_store.readers.cache import open_cache
from tests.stores import RAGGED, Shape, build_store


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A store of 42 shards of one sample each."""
    directory = tmp_path_factory.mktemp("cluster") / "store"
    return build_store(directory, lengths=RAGGED * 6, shape=Shape(shard_size=1), spoiled=4).path


def text_of(path, **options):
    return json.dumps(measure_store(open_cache(path), Rules(), **options), allow_nan=False)


def test_a_cluster_writes_the_same_bytes_as_threads(cluster, path, tmp_path):
    assert main(["stats", str(path), "--output", str(tmp_path / "threads")]) == 0
    scheduler = ["--scheduler", cluster.scheduler_address]
    assert main(["stats", str(path), "--output", str(tmp_path / "cluster"), *scheduler]) == 0
    for name in ("stats.json", "stats.html"):
        assert (tmp_path / "threads" / name).read_bytes() == (tmp_path / "cluster" / name).read_bytes()


def test_a_worker_that_is_killed_midway_changes_nothing(cluster, path):
    done: list[int] = []
    killed: list[int] = []

    def kill_a_worker(samples):
        done.append(samples)
        if len(done) == 3:
            killed.append(cluster.workers[0].pid)
            os.kill(killed[0], signal.SIGKILL)

    class Watch(Unseen):
        def advance(self, units, note=""):
            kill_a_worker(units)

    expected = text_of(path)
    with progress_shown_by(Watch):
        assert text_of(path, workers=Workers(scheduler=cluster.scheduler_address)) == expected
    assert killed
    assert sum(done) == 42
