"""The worked examples are those of Megatron-LM at d98e8a64 and hyper-parallel at 427916e6."""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.sources.megatron import WindowIndices, WindowSettings, build_indices
from dspark_store.sources.megatron import windows as windows_module
from dspark_store.sources.megatron.windows import cache_key, cached_indices, split_units
from dspark_store.sources.source import SourceError
from tests.sources.megatron.pairs import numbered

SIZES = (5, 3, 8, 4)
TWICE = [1, 1, 0, 3, 2, 0, 3, 2]
TWICE_ROWS = [(0, 0), (1, 1), (2, 2), (3, 1), (4, 1), (4, 5), (5, 1), (6, 0), (7, 0), (7, 4)]
ONCE_ROWS = [(0, 0), (1, 1), (2, 1), (3, 0), (3, 4)]
SEPARATE_ROWS = [*ONCE_ROWS, (4, 0), (5, 1), (6, 1), (7, 0), (7, 4)]


def indices(sizes=SIZES, *, window=4, seed=42, **settings) -> WindowIndices:
    return build_indices(np.array(sizes, np.int64), WindowSettings(window, seed, **settings))


def rows(built: WindowIndices) -> list[tuple[int, ...]]:
    return [tuple(row) for row in built.sample.tolist()]


def items(built: WindowIndices, sizes=SIZES, extra: int = 1) -> list[list[int]]:
    documents = numbered(sizes)
    lengths = np.array(sizes)
    return [
        [
            token
            for unit, start, stop in built.pieces(place, lengths, extra=extra)
            for token in documents[unit][start:stop]
        ]
        for place in range(len(built.shuffle))
    ]


@pytest.mark.parametrize(
    ("num_samples", "rule", "document", "sample", "shuffle", "first"),
    [
        (4, "megatron", [1, 3, 0, 2], ONCE_ROWS, [1, 3, 0, 2], [301, 302, 303, 0]),
        (4, "hyper_parallel", [1, 3, 0, 2], ONCE_ROWS, [1, 3, 0, 2], [301, 302, 303, 0]),
        (6, "megatron", [1, 3, 0, 2, 1, 3, 0, 2], SEPARATE_ROWS, [3, 0, 1, 2, 7, 5, 4, 8, 6], [200, 201, 202, 203]),
        (6, "hyper_parallel", TWICE, TWICE_ROWS, [5, 0, 3, 4, 2, 1], [205, 206, 207, 0]),
        (8, "megatron", TWICE, TWICE_ROWS, [4, 7, 0, 3, 5, 8, 2, 1, 6], [201, 202, 203, 204]),
        (8, "hyper_parallel", TWICE, TWICE_ROWS, [3, 7, 0, 4, 5, 2, 1, 6], [301, 302, 303, 200]),
        (9, "megatron", TWICE, TWICE_ROWS, [4, 7, 0, 3, 5, 8, 2, 1, 6], [201, 202, 203, 204]),
        (9, "hyper_parallel", TWICE, TWICE_ROWS, [4, 7, 0, 3, 5, 8, 2, 1, 6], [201, 202, 203, 204]),
    ],
)
def test_the_worked_examples_of_both_rules(num_samples, rule, document, sample, shuffle, first):
    built = indices(num_samples=num_samples, rule=rule)
    assert built.document.tolist() == document
    assert rows(built) == sample
    assert built.shuffle.tolist() == shuffle
    assert items(built, extra=0)[0] == first


def test_a_corpus_shorter_than_a_window_is_repeated_only_when_samples_are_asked_for():
    assert len(indices((3, 2), window=8).shuffle) == 0
    one = indices((3, 2), window=8, num_samples=1)
    assert (one.document.tolist(), rows(one)) == ([1, 1, 0, 0], [(0, 0), (3, 1)])
    for rule in ("megatron", "hyper_parallel"):
        three = indices((3, 2), window=8, num_samples=3, rule=rule)
        assert three.document.tolist() == [0, 1, 1, 0, 1, 0, 1, 0, 1, 0]
        assert rows(three) == [(0, 0), (3, 1), (6, 1), (9, 2)]
        assert three.shuffle.tolist() == [1, 0, 2]


@pytest.mark.parametrize(("tokens", "keep", "lengths"), [(21, True, [8, 8, 4]), (21, False, [8, 8]), (5, True, [4])])
def test_the_tail_of_a_text_is_a_window_or_dropped_as_hyper_parallel_tests_it(tokens, keep, lengths):
    built = indices((tokens,), window=8, keep_partial=keep)
    assert sorted(map(len, items(built, (tokens,), extra=0)), reverse=True) == lengths


def test_the_count_of_samples_is_exact_where_a_32_bit_float_is_not():
    assert len(indices((16_777_218,), window=4096, keep_partial=True).shuffle) == 4097


@pytest.mark.parametrize(("num_samples", "separate"), [(35, True), (36, False)])
def test_a_last_epoch_is_shuffled_by_itself_below_80_percent_of_its_samples(num_samples, separate):
    """An epoch has 20 samples, and 80 % of that is 16; there are 20 before the last epoch."""
    built = indices([1] * 21, window=1, num_samples=num_samples)
    assert (sorted(built.document[:21].tolist()) == list(range(21))) is separate
    assert (sorted(built.shuffle[:20].tolist()) == list(range(20))) is separate


def test_a_corpus_without_tokens_is_refused_and_not_repeated_forever():
    with pytest.raises(SourceError, match="hold no tokens"):
        indices((0, 0), num_samples=5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"rule": "other"}, "rule is 'other'; expected one of megatron, hyper_parallel"),
    ],
)
def test_settings_that_cannot_be_are_refused(change, message):
    with pytest.raises(SourceError, match=message):
        indices(**change)


@pytest.mark.parametrize(
    ("weights", "count", "parts"),
    [
        ("5,1,1", 7, [(0, 5), (5, 6), (6, 7)]),
        ("990,9,1", 1000, [(0, 990), (990, 999), (999, 1000)]),
        ("1", 3, [(0, 3), (3, 3), (3, 3)]),
        ("50,50", 4, [(0, 2), (2, 4), (4, 4)]),
    ],
)
def test_a_corpus_is_split_by_weights(weights, count, parts):
    assert [split_units(count, weights, part) for part in ("train", "valid", "test")] == parts


@pytest.mark.parametrize("weights", ["", "a,b", "1,2,3,4", "-1,2", "0,0", "nan,1", "inf"])
def test_weights_of_a_split_that_cannot_be_are_refused(weights):
    with pytest.raises(SourceError, match="up to three weights"):
        split_units(5, weights, "train")


def test_an_unknown_part_of_a_split_is_refused():
    with pytest.raises(SourceError, match="part is 'dev'; expected one of train, valid, test"):
        split_units(5, "1,1", "dev")


settings_of_windows = st.builds(
    WindowSettings,
    window=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
    num_samples=st.none() | st.integers(1, 40),
    rule=st.sampled_from(["megatron", "hyper_parallel"]),
    keep_partial=st.booleans(),
    extra_token=st.booleans(),
)


@given(sizes=st.lists(st.integers(0, 7), min_size=1, max_size=9).filter(any), settings=settings_of_windows)
def test_the_indices_are_those_of_a_walk_over_every_token(sizes, settings):
    document, sample, shuffle = plain_indices(sizes, settings)
    built = build_indices(np.array(sizes, np.int64), settings)
    assert built.document.tolist() == document
    assert rows(built) == sample
    assert built.shuffle.tolist() == shuffle

    flat = [token for unit in document for token in numbered(sizes)[unit]]
    size = settings.window
    extra = int(settings.extra_token)
    assert items(built, sizes, extra) == [flat[k * size : k * size + size + extra] for k in shuffle]


def plain_indices(sizes, settings) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """The indices, token by token."""
    tokens, extra, size = sum(sizes), int(settings.extra_token), settings.window
    epochs = 1
    while settings.num_samples is not None and epochs * tokens < settings.num_samples * size + extra:
        epochs += 1
    before = ((epochs - 1) * tokens - extra) // size
    separate = (
        settings.rule == "megatron"
        and epochs > 1
        and settings.num_samples - before < int(0.80 * ((tokens - extra) // size))
    )
    random = np.random.RandomState(settings.seed)

    def shuffled(numbers) -> list[int]:
        array = np.array(numbers, np.int64)
        random.shuffle(array)
        return [int(number) for number in array]

    once = list(range(len(sizes)))
    document = shuffled(once * (epochs - 1)) + shuffled(once) if separate else shuffled(once * epochs)

    places = [(slot, offset) for slot, unit in enumerate(document) for offset in range(sizes[unit])]
    sample = [(0, 0)]
    position = size
    last = len(places) - extra
    while position <= last or (settings.keep_partial and position - size < last):
        position = min(position, last)
        if extra:
            sample.append(places[position])
        else:
            slot, offset = places[position - 1]
            sample.append((slot, offset + 1))
        position += size
    count = len(sample) - 1
    if settings.rule == "hyper_parallel" and settings.num_samples is not None:
        count = min(count, settings.num_samples)
    numbers = list(range(count))
    return document, sample, shuffled(numbers[:before]) + shuffled(numbers[before:]) if separate else shuffled(numbers)


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

    return lambda: monkeypatch.setattr(windows_module, "build_indices", refuse)


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
