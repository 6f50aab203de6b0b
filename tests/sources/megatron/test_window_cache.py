import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dspark_store.sources.megatron import WindowIndices, WindowSettings, build_indices
from dspark_store.sources.megatron import window_cache as cache_module
from dspark_store.sources.megatron.window_cache import cache_key, cached_indices

LENGTHS = np.array([5, 3, 8, 4], np.int64)
SETTINGS = WindowSettings(4, 42, num_samples=6)


def equal(one: WindowIndices, other: WindowIndices) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("document", "sample", "shuffle"))


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return Path(tmp_path, "home", "dspark-store", "megatron")


@pytest.fixture
def no_building(monkeypatch):
    """Make it an error to build indices: they must come from the cache."""

    def refuse(*_) -> WindowIndices:
        raise AssertionError("the indices were built")

    return lambda: monkeypatch.setattr(cache_module, "build_indices", refuse)


def test_the_second_time_the_indices_are_read_and_not_built(tmp_path, no_building):
    built = cached_indices(LENGTHS, SETTINGS, tmp_path / "windows")
    no_building()
    read = cached_indices(LENGTHS, SETTINGS, tmp_path / "windows")
    assert equal(read, built)
    assert isinstance(read.document, np.memmap)
    assert [path.name for path in (tmp_path / "windows").iterdir()] == [cache_key(LENGTHS, SETTINGS)]


def test_a_set_without_samples_is_kept_too(tmp_path, no_building):
    settings = WindowSettings(100, 1)
    cached_indices(LENGTHS, settings, tmp_path / "windows")
    no_building()
    assert len(cached_indices(LENGTHS, settings, tmp_path / "windows").shuffle) == 0


def test_the_key_knows_every_length_and_every_setting():
    changed = [
        WindowSettings(5, 42, num_samples=6),
        WindowSettings(4, 43, num_samples=6),
        WindowSettings(4, 42, num_samples=7),
        WindowSettings(4, 42, num_samples=6, rule="hyper_parallel"),
        WindowSettings(4, 42, num_samples=6, keep_partial=True),
        WindowSettings(4, 42, num_samples=6, extra_token=False),
    ]
    keys = [cache_key(LENGTHS, settings) for settings in (SETTINGS, *changed)]
    keys += [cache_key(LENGTHS[[1, 0, 2, 3]], SETTINGS), cache_key(LENGTHS[:3], SETTINGS)]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("document.npy", "flip"),
        ("sample.npy", "cut"),
        ("shuffle.npy", "remove"),
        ("digests.json", "flip"),
        ("digests.json", "remove"),
    ],
)
def test_a_damaged_set_is_built_again(file, damage, tmp_path, no_building):
    built = cached_indices(LENGTHS, SETTINGS, tmp_path)
    path = tmp_path / cache_key(LENGTHS, SETTINGS) / file
    content = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if damage == "flip" else content[:-3])
    assert equal(cached_indices(LENGTHS, SETTINGS, tmp_path), built)
    no_building()
    assert equal(cached_indices(LENGTHS, SETTINGS, tmp_path), built)


def test_a_directory_that_cannot_be_written_falls_back_to_the_users_own(tmp_path, home, caplog, no_building):
    (tmp_path / "file").touch()
    built = cached_indices(LENGTHS, SETTINGS, tmp_path / "file" / "windows")
    assert (home / cache_key(LENGTHS, SETTINGS)).is_dir()
    assert "cannot hold the indices" in caplog.text
    no_building()
    assert equal(cached_indices(LENGTHS, SETTINGS, tmp_path / "file" / "windows"), built)


def test_where_nothing_can_be_written_the_indices_are_built_each_time(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert equal(cached_indices(LENGTHS, SETTINGS, tmp_path / "file"), build_indices(LENGTHS, SETTINGS))
    assert "kept nowhere" in caplog.text


def test_a_failure_half_way_leaves_no_set(tmp_path, monkeypatch):
    def fail(path, array, **_) -> None:
        if Path(path).name == "shuffle.npy":
            raise OSError(28, "No space left on device")
        Path(path).write_bytes(b"half")

    monkeypatch.setattr(np, "save", fail)
    cached_indices(LENGTHS, SETTINGS, tmp_path / "windows")
    assert not list((tmp_path / "windows").iterdir())


def test_what_a_killed_process_left_is_swept_a_day_later(tmp_path):
    key = cache_key(LENGTHS, SETTINGS)
    old, new, foreign = (tmp_path / name for name in (f".{key}.old", f".{key}.new", ".config.old"))
    for left in (old, new, foreign):
        left.mkdir()
        (left / "document.npy").touch()
    os.utime(old, (0, 0))
    os.utime(foreign, (0, 0))
    cached_indices(LENGTHS, SETTINGS, tmp_path)
    assert not old.exists()
    assert new.exists()
    assert foreign.exists()


def test_many_at_once_agree_and_leave_one_set(tmp_path, caplog):
    with ThreadPoolExecutor(8) as threads:
        all_built = list(threads.map(lambda _: cached_indices(LENGTHS, SETTINGS, tmp_path / "windows"), range(16)))
    assert all(equal(built, all_built[0]) for built in all_built)
    assert len(list((tmp_path / "windows").iterdir())) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
