"""Storage of a fixed rate, and the rate of the storage that is there."""

import time

import pytest

from benchmarks.storage import RateLimit, RateLimitedStorage, drop_from_cache, measured_rate


def test_bytes_come_no_faster_than_the_line(tmp_path):
    (tmp_path / "object").write_bytes(bytes(200_000))
    limit = RateLimit(1e6)
    reader = RateLimitedStorage(tmp_path, limit).open("object")
    started = time.perf_counter()
    reader.read(0, 100_000)
    reader.read(100_000, 50_000)
    assert time.perf_counter() - started >= 0.15
    assert limit.total == 150_000
    reader.close()


def test_what_comes_behind_waits_for_what_goes_before():
    limit = RateLimit(1e6)
    first, second = limit.reserve(1_000_000), limit.reserve(500_000)
    assert second - first == pytest.approx(0.5)
    limit.reset(2e6)
    assert limit.total == 0
    assert limit.reserve(1) < second


def test_measuring_a_directory_leaves_nothing_in_it(tmp_path):
    assert measured_rate(tmp_path, 2, 8 * 2**20) > 0
    assert list(tmp_path.iterdir()) == []


def test_dropped_files_are_as_they_were(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"kept")
    drop_from_cache(tmp_path)
    drop_from_cache(tmp_path / "folder" / "file")
    assert (tmp_path / "folder" / "file").read_bytes() == b"kept"
