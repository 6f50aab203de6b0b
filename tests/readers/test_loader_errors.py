"""Whatever goes wrong, the consumer gets the error, and no thread, file or buffer is left behind."""

import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark_store import Cache, CacheLoader, DamagedStoreError, open_cache
from dspark_store.format.files import LocalObject
from dspark_store.format.schema import IDS, LAYERS
from dspark_store.format.storage import LocalStorage
from dspark_store.readers.fetch import Fetch
from dspark_store.readers.tensors import BatchMemory
from tests.processes import until
from tests.stores import BuiltStore, build_store, flip

LENGTHS = (20, 7, 13, 8, 3, 9, 16, 20, 17)
LAYER_OBJECT = f"{LAYERS}/c.1.0.0"
"""An object of samples 3 to 5: the second batch of three, unshuffled."""
INTERRUPTED = """
import itertools, os, sys, threading, time
from dspark_store import CacheLoader, open_cache
from dspark_store.format.files import LocalObject

def say(word):
    os.write(1, f"{word}\\n".encode())  # an interrupt amid the flush of a print has its line printed once more

loader = CacheLoader(open_cache(sys.argv[1]), 1, dp_rank=0, dp_size=1)
try:
    for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
        say("training")
        time.sleep(600)
except KeyboardInterrupt:
    del batch
read = LocalObject.read_into
LocalObject.read_into = lambda self, buffer, offset: (time.sleep(0.2), read(self, buffer, offset))[1]
say("prefetch" in [thread.name for thread in threading.enumerate()])
for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
    say("reading")
"""
"""A program that is interrupted twice: while it trains, and while it waits for slow storage."""


@pytest.fixture
def store(tmp_path: Path) -> BuiltStore:
    return build_store(tmp_path / "store", lengths=LENGTHS, weights=False)


@pytest.fixture
def cache(store: BuiltStore) -> Cache:
    return open_cache(store.path)


def loader_of(cache: Cache, **options: Any) -> CacheLoader:
    """A loader whose second batch of three holds what the tests damage."""
    return CacheLoader(cache, 3, **{"shuffle": False, "min_supervised": 0, "dp_rank": 0, "dp_size": 1, **options})


def prefetching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def open_files(store: BuiltStore) -> list[str]:
    """The store's files that this process has open."""
    paths = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            paths.append(str(descriptor.readlink()))
        except FileNotFoundError:
            continue  # the listing's own
    return [path for path in paths if path.startswith(str(store.path))]


def assert_second_batch_fails(cache: Cache, error: type[Exception], message: str) -> CacheLoader:
    """Take the first batch, which is whole; the second must raise. Return the loader."""
    loader = loader_of(cache)
    iteration = iter(loader)
    assert next(iteration)["sample"].tolist() == [0, 1, 2]
    with pytest.raises(error, match=message):
        next(iteration)
    assert not prefetching()
    return loader


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda place: (place / LAYER_OBJECT).unlink(), rf"layer 2, .*object {LAYER_OBJECT} is missing from"),
        (lambda place: os.truncate(place / LAYER_OBJECT, 900), rf"layer 2, .*object {LAYER_OBJECT}"),
        (
            lambda place: flip(place / LAYER_OBJECT, 40),
            rf"layer 2, sample 3 \(shard 1\): object {LAYER_OBJECT}, slot 0",
        ),
        (lambda place: flip(place / f"{IDS}/c.1.0", 8), rf"{IDS}, sample 3 \(shard 1\): object {IDS}/c.1.0, slot 0"),
    ],
    ids=["deleted", "truncated", "flipped", "flipped tokens"],
)
def test_damage_is_named_with_its_object(store: BuiltStore, cache: Cache, harm, message) -> None:
    harm(store.path)
    assert_second_batch_fails(cache, DamagedStoreError, message)


def test_an_object_truncated_while_it_is_open_is_named(store: BuiltStore, cache: Cache) -> None:
    cache.read(range(3, 6))
    os.truncate(store.path / LAYER_OBJECT, 10)
    assert_second_batch_fails(
        cache, DamagedStoreError, rf"layer 2, sample 3 .*object {LAYER_OBJECT} ends \d+ bytes early"
    )


def test_after_a_repair_the_loader_goes_on_with_the_batch_that_failed(store: BuiltStore, cache: Cache) -> None:
    flip(store.path / LAYER_OBJECT, 40)
    loader = assert_second_batch_fails(cache, DamagedStoreError, "sample 3")
    assert loader.state_dict()["consumed"] == 3
    flip(store.path / LAYER_OBJECT, 40)
    loader.load_state_dict(loader.state_dict())
    assert [batch["sample"].tolist() for batch in loader] == [[3, 4, 5], [6, 7, 8]]


def test_an_error_in_a_reading_thread_reaches_the_consumer(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []

    def failing(self: Fetch) -> None:
        names.append(threading.current_thread().name)
        raise RuntimeError("the decoder broke")

    monkeypatch.setattr(Fetch, "decode", failing)
    with pytest.raises(RuntimeError, match="the decoder broke") as caught:
        next(iter(loader_of(cache)))
    assert "failing" in [entry.name for entry in caught.traceback]
    assert all(name.startswith("read_") for name in names)
    assert not prefetching()


def test_an_error_in_the_producer_reaches_the_consumer(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    lease, leased = BatchMemory.lease, []

    def failing(self: BatchMemory, rows: int, length: int) -> dict[str, torch.Tensor]:
        leased.append(rows)
        if len(leased) == 2:
            raise MemoryError("no block is left")
        return lease(self, rows, length)

    monkeypatch.setattr(BatchMemory, "lease", failing)
    assert_second_batch_fails(cache, MemoryError, "no block is left")


def test_an_error_in_the_training_step_ends_the_iteration(cache: Cache) -> None:
    def train(loader: CacheLoader) -> None:
        for _ in loader:
            raise FloatingPointError("the loss is NaN")

    with pytest.raises(FloatingPointError):
        train(loader_of(cache))
    gc.collect()
    assert not prefetching()


def test_a_consumer_that_stops_after_one_batch_leaves_nothing(store: BuiltStore) -> None:
    cache = open_cache(store.path)
    loader = loader_of(cache, prefetch_bytes=1)
    for _ in loader:
        break
    assert not prefetching()
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None
    del cache
    gc.collect()
    assert not open_files(store)


def test_an_iterator_that_never_started_leaves_nothing(cache: Cache) -> None:
    loader = loader_of(cache)
    iterator = iter(loader)
    gone = weakref.ref(loader)
    del iterator, loader
    gc.collect()
    assert gone() is None
    assert not prefetching()


def test_closing_in_the_middle_of_an_epoch_closes_files_and_threads(store: BuiltStore, cache: Cache) -> None:
    before = threading.active_count()
    loader = loader_of(cache, prefetch_bytes=1)
    iteration = iter(loader)
    batch = next(iteration)
    assert open_files(store)
    loader.close()
    assert not open_files(store)
    assert threading.active_count() == before
    assert list(iteration) == []
    assert batch["sample"].tolist() == [0, 1, 2]
    loader.close()


def test_a_second_iteration_ends_the_first(cache: Cache) -> None:
    loader = loader_of(cache, prefetch_bytes=1)
    first = iter(loader)
    assert next(first)["sample"].tolist() == [0, 1, 2]
    second = iter(loader)
    assert next(second)["sample"].tolist() == [0, 1, 2]
    assert len(prefetching()) == 1
    assert list(first) == []
    assert [batch["sample"].tolist() for batch in second] == [[3, 4, 5], [6, 7, 8]]
    assert not prefetching()


def test_two_loaders_of_one_cache_may_be_closed_apart(cache: Cache) -> None:
    train, validation = loader_of(cache), loader_of(cache)
    iteration = iter(train)
    next(iteration)
    list(validation)
    validation.close()
    assert [batch["sample"].tolist() for batch in iteration] == [[3, 4, 5], [6, 7, 8]]


def test_an_interrupt_ends_the_loader_and_the_program_at_once(store: BuiltStore) -> None:
    command = [sys.executable, "-c", INTERRUPTED, str(store.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "training\n"
        program.send_signal(signal.SIGINT)
        assert program.stdout.readline() == "False\n"
        assert program.stdout.readline() == "reading\n"
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=60)
    assert program.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert "Exception ignored" not in errors


def waits_in_submit(thread: int) -> bool:
    names = [entry.name for entry in traceback.extract_stack(sys._current_frames()[thread])]
    return names[-1] == "wait" and "submit" in names


def test_an_interrupt_ends_a_read_that_waits_for_room(store: BuiltStore, monkeypatch: pytest.MonkeyPatch) -> None:
    main, read, sent = threading.main_thread().ident, LocalObject.read_into, threading.Event()
    assert main is not None

    def interrupting(self: LocalObject, buffer: Any, offset: int) -> int:
        if not sent.is_set():
            until(lambda: waits_in_submit(main))
            sent.set()
            signal.pthread_kill(main, signal.SIGINT)
        return read(self, buffer, offset)

    monkeypatch.setattr(LocalObject, "read_into", interrupting)
    cache = open_cache(store.path, threads=1, in_flight=1)
    with pytest.raises(KeyboardInterrupt):
        cache.read(range(9))
    assert len(cache.read(range(9))) == 4


def test_a_read_that_fails_once_is_an_error_and_the_next_try_goes_on(cache: Cache, monkeypatch) -> None:
    read, calls = LocalObject.read_into, []

    def failing_once(self: LocalObject, buffer: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 1:
            raise OSError(5, "Input/output error")
        return read(self, buffer, offset)

    monkeypatch.setattr(LocalObject, "read_into", failing_once)
    loader = loader_of(cache, columns=[LAYERS])
    with pytest.raises(OSError, match=r"samples 0 to 2 \(shard 0\): cannot read .*: Input/output error") as caught:
        list(loader)
    assert caught.value.errno == 5
    assert len(list(loader)) == 3


def test_trouble_of_the_storage_is_no_damage(store: BuiltStore, cache: Cache, monkeypatch) -> None:
    """What the file system refuses comes as it is, with the object's name, when it is opened and when it is read."""

    def refused(self: LocalObject, buffer: Any, offset: int) -> int:
        raise OSError(5, "Input/output error")

    where = rf"layer 2, samples? [0-9 to]+ \(shard 1\): cannot read {LAYER_OBJECT} of {store.path}: "
    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "open", _forbidding(LAYER_OBJECT))
        assert_second_batch_fails(cache, PermissionError, rf"^\[Errno 13\] {LAYERS}, {where}Permission denied$")
    cache.read(range(9))
    with monkeypatch.context() as patched:
        patched.setattr(LocalObject, "read_into", refused)
        with pytest.raises(OSError, match=rf"^\[Errno 5\] {LAYERS}, {where}Input/output error$"):
            cache.read(range(3, 6), columns=[LAYERS], layers=[2])
    cache.read(range(9))


def _forbidding(key: str) -> Callable[[LocalStorage, str], LocalObject]:
    """Return an ``open`` that is denied one object."""
    opened = LocalStorage.open

    def open_other(self: LocalStorage, wanted: str) -> LocalObject:
        if wanted == key:
            raise PermissionError(13, "Permission denied", str(self.path(key)))
        return opened(self, wanted)

    return open_other
