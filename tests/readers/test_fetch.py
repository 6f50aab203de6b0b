"""Objects are opened a few at a time, read by the ranges that are wanted, and decoded into their places."""

import gc
import os
import signal
import threading
import weakref
from collections.abc import Buffer, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_store import Cache, CacheLoader, DamagedStoreError, open_cache
from dspark_store.format.codecs import plain_chain
from dspark_store.format.files import LocalObject
from dspark_store.format.grid import ShardGrid
from dspark_store.format.objects import Expected, Scratch, open_object
from dspark_store.format.schema import IDS, LAST, LAYERS, MASK
from dspark_store.format.shard import ObjectLabel, Place, ShardWriter
from dspark_store.format.storage import LocalStorage, ObjectReader
from dspark_store.readers.fetch import Fetch, Fetcher
from dspark_store.readers.plan import ObjectRead, RowSpan, SampleSpan
from dspark_store.readers.ranges import Buffers
from dspark_store.readers.threads import ForkSafeLock, Pending, Workers
from tests.stores import BuiltStore, Shape, build_store, flip, padded, same_bits

FORKED = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
SIX_LAYERS = Shape(seq_length=64, shard_size=4, chunk_tokens=16, hidden_size=64, layer_ids=(0, 1, 2, 3, 4, 5))


class CountingObject:
    """`ObjectReader` that counts what is read, and is in the list of open objects until it is closed."""

    def __init__(self, reader: LocalObject, storage: "CountingStorage") -> None:
        self.size = reader.size
        self._reader = reader
        self._storage = storage
        with storage.lock:
            storage.open_now += 1
            storage.most_open = max(storage.most_open, storage.open_now)

    def version(self) -> tuple[int, int, int, int]:
        return self._reader.version()

    def read(self, offset: int, length: int) -> bytes:
        return self._reader.read(offset, length)

    def read_into(self, buffer: Buffer, offset: int) -> int:
        return self._count(self._reader.read_into(buffer, offset))

    def read_vector(self, buffers: Sequence[Buffer], offset: int) -> int:
        return self._count(self._reader.read_vector(buffers, offset))

    def close(self) -> None:
        self._reader.close()

    def __del__(self) -> None:
        with self._storage.lock:
            self._storage.open_now -= 1

    def _count(self, nbytes: int) -> int:
        with self._storage.lock:
            self._storage.nbytes += nbytes
            self._storage.reads += 1
        return nbytes


class CountingStorage(LocalStorage):
    """Local storage that counts bytes and reads of chunks (not of tails), and open objects."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.lock = threading.RLock()  # a collection inside it may close an object
        self.nbytes = self.reads = self.open_now = self.most_open = 0

    def open(self, key: str) -> ObjectReader:  # type: ignore[override]  # any reader will do
        return CountingObject(super().open(key), self)


@pytest.fixture(scope="module", params=["none", "default"])
def six_layers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BuiltStore:
    place = tmp_path_factory.mktemp("six-layers")
    return build_store(place, codec=request.param, lengths=(64, 40, 7, 64, 33, 64), shape=SIX_LAYERS, weights=False)


def bytes_read(store: BuiltStore, **request: Any) -> int:
    """Return the bytes of chunks that reading all samples takes, one after the other."""
    storage = CountingStorage(store.path)
    cache = Cache(storage, verify=True)
    for row in range(6):
        cache.read([row], **request)
    return storage.nbytes


def test_two_of_six_layers_take_a_third_of_the_bytes(six_layers: BuiltStore) -> None:
    some = bytes_read(six_layers, columns=[LAYERS], layers=[4, 1])
    assert some <= 0.36 * bytes_read(six_layers, columns=[LAYERS])


def test_a_slice_of_positions_reads_only_its_chunks(six_layers: BuiltStore) -> None:
    parts = [bytes_read(six_layers, columns=[LAST], positions=part) for part in (slice(0, 16), slice(16, 64))]
    assert sum(parts) == bytes_read(six_layers, columns=[LAST])


def test_columns_that_are_not_asked_for_are_not_read(six_layers: BuiltStore) -> None:
    assert bytes_read(six_layers, columns=[MASK]) < 0.2 * bytes_read(six_layers, columns=[LAST])


@pytest.mark.parametrize("kept", [True, False])
def test_small_token_columns_are_read_once_for_all_epochs(six_layers: BuiltStore, kept: bool, monkeypatch) -> None:
    storage, tokens = CountingStorage(six_layers.path), sum((64, 40, 7, 64, 33, 64))
    monkeypatch.setattr("dspark_store.readers.tokens.KEPT_TOKEN_BYTES", tokens * 5 if kept else tokens * 5 - 1)
    loader = CacheLoader(Cache(storage), 2, columns=(IDS, MASK), shuffle=False, min_supervised=0, dp_rank=0, dp_size=1)
    epochs = [list(loader)]
    after_one = storage.nbytes
    epochs.append(list(loader))
    assert (storage.nbytes == after_one) is kept
    whole = Cache(storage).read(range(6), columns=(IDS, MASK))
    for batches in epochs:
        for column in (IDS, MASK):
            assert torch.equal(torch.cat([batch[column] for batch in batches]), whole[column])


def test_neighbours_are_read_at_once(six_layers: BuiltStore) -> None:
    storage = CountingStorage(six_layers.path)
    Cache(storage, verify=True).read(range(4), columns=[LAYERS], layers=[2], layout="stacked")
    assert storage.reads == 1


@pytest.mark.parametrize("column", [IDS, LAST])
def test_objects_of_one_column_are_read_side_by_side(six_layers: BuiltStore, column: str, monkeypatch) -> None:
    both = threading.Barrier(2, timeout=20)

    def meeting(read: Callable[..., int]) -> Callable[..., int]:
        return lambda *arguments: (both.wait(), read(*arguments))[1]

    for name in ("read_into", "read_vector"):
        monkeypatch.setattr(LocalObject, name, meeting(getattr(LocalObject, name)))
    open_cache(six_layers.path, threads=2).read([0, 5], columns=[column])


def test_the_last_layer_and_the_last_states_are_read_once(six_layers: BuiltStore) -> None:
    both, last = [LAYERS, LAST], [LAST]
    assert bytes_read(six_layers, columns=both, layers=[5]) == bytes_read(six_layers, columns=last)
    assert bytes_read(six_layers, columns=both, layers=[0, 5]) == bytes_read(
        six_layers, columns=[LAYERS], layers=[0, 5]
    )


@settings(max_examples=40)
@given(
    rows=st.lists(st.integers(0, 5), max_size=4),
    layers=st.lists(st.integers(0, 5), max_size=4),
    start=st.integers(0, 64),
    stop=st.integers(0, 64),
    columns=st.sampled_from([[LAYERS], [LAYERS, LAST], [LAST, LAYERS]]),
)
def test_layers_are_the_same_with_and_without_the_last_states(six_layers, rows, layers, start, stop, columns) -> None:
    expected = padded(six_layers)
    positions = slice(start, stop)
    batch = open_cache(six_layers.path).read(
        rows, columns=columns, layers=layers, positions=positions, layout="stacked"
    )
    assert same_bits(batch[LAYERS], expected.layers[rows][:, layers][:, :, positions])
    if LAST in columns:
        assert same_bits(batch[LAST], expected.last[rows][:, positions])


@pytest.mark.parametrize("open_objects", [1, 9, 12])
def test_open_objects_stay_under_their_bound(six_layers: BuiltStore, open_objects: int) -> None:
    storage, threads = CountingStorage(six_layers.path), 4
    cache = Cache(storage, threads=threads, in_flight=threads, open_objects=open_objects)
    for _ in range(10):
        cache.read([5, 0, 3, 2])
    assert storage.most_open <= max(open_objects, threads + 1)
    cache.close()
    assert storage.open_now == 0


def test_no_open_objects_at_all_are_refused(six_layers: BuiltStore) -> None:
    with pytest.raises(ValueError, match="open_objects must be >= 1, got 0"):
        open_cache(six_layers.path, open_objects=0)


def test_of_an_open_object_only_what_reading_needs_is_kept(six_layers: BuiltStore) -> None:
    storage, grid, key = LocalStorage(six_layers.path), six_layers.schema.states, f"{LAST}/c.0.0.0"
    expected = Expected(six_layers.record.store_id, Place(LAST, 0, None, 0))
    tail = open_object(storage, key, grid, expected).tail
    for values in (tail.bounds, tail.crcs):
        assert values.base is None or values.base.nbytes == values.nbytes  # holds no bytes beside its own
    assert tail.bounds.nbytes + tail.crcs.nbytes <= 12 * grid.slots


def test_an_object_whose_rows_lie_apart_is_named(tmp_path: Path) -> None:
    storage, grid = LocalStorage(tmp_path), ShardGrid(1, 1, 16, 8)
    writer = ShardWriter(storage.create("c.0"), grid.slots)
    for slot in (1, 0):
        writer.append(slot, plain_chain(2).encode(np.zeros((8, 4), np.uint16)))
    place = Place(LAST, 0, None, 0)
    writer.finish(ObjectLabel("s", (place,), 1, "t"))
    with pytest.raises(DamagedStoreError, match=r"^object c\.0 does not keep the chunks in slots 0 to 1 together"):
        open_object(storage, "c.0", grid, Expected("s", place))


@pytest.mark.parametrize("verify", [True, False])
def test_plain_chunks_of_another_size_are_damage(tmp_path: Path, verify: bool) -> None:
    """Together they have the bytes that two chunks of eight positions have."""
    storage, grid, place = LocalStorage(tmp_path), ShardGrid(1, 1, 16, 8), Place(LAST, 0, None, 0)
    writer = ShardWriter(storage.create("c.0"), grid.slots)
    writer.append(0, *(plain_chain(2).encode(np.zeros((positions, 4), np.uint16)) for positions in (4, 12)))
    writer.finish(ObjectLabel("s", (place,), 1, "t"))
    stored = open_object(storage, "c.0", grid, Expected("s", place))
    target, chain = np.empty((1, 1, 16, 4), np.uint16), plain_chain(2)
    fetcher = Fetcher(LAST, grid, chain, target, "s", verify, Buffers(), Scratch(), lambda _, error: error)
    read = ObjectRead(0, 0, 0, (RowSpan(0, 0, 2, SampleSpan(0, 0, 16, 0, 0, 16)),))
    fetch = Fetch(fetcher, read, Pending(lambda: None))
    for offset, buffers in fetch.ranges(stored):
        stored.reader.read_vector(buffers, offset)
    with pytest.raises(DamagedStoreError, match=r"object c\.0, slot 0: "):
        fetch.decode()


@pytest.mark.parametrize("layout", ["flat", "stacked"])
def test_without_checks_a_flipped_value_comes_through(layout: str, tmp_path: Path) -> None:
    store = build_store(tmp_path, codec="none", lengths=(20, 20), weights=False)
    flip(tmp_path / f"{LAYERS}/c.0.0.0", 0)
    expected = padded(store).layers[0, :1].clone().view(torch.int16)
    expected[0, 0, 0] ^= 1
    batch = open_cache(tmp_path, verify=False).read([0], columns=[LAYERS], layers=[2], layout=layout)  # type: ignore[arg-type]
    assert np.array_equal(batch[LAYERS].reshape(1, 20, 8).view(torch.int16).numpy(), expected.numpy())
    with pytest.raises(DamagedStoreError, match=r"layer 2, sample 0 \(shard 0\)"):
        open_cache(tmp_path).read([0], columns=[LAYERS], layers=[2], layout=layout)  # type: ignore[arg-type]


@pytest.fixture
def held_lock() -> Iterator[ForkSafeLock]:
    """A lock that another thread holds."""
    lock, release, held = ForkSafeLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock.held:
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    yield lock
    release.set()
    thread.join()


def exit_code_of_fork(check: Callable[[], bool]) -> int:
    """Check something in a forked process: 7 when it holds; an alarm ends a process that waits for ever."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        try:
            os._exit(7 if check() else 1)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@FORKED
def test_a_lock_that_a_thread_holds_is_open_in_a_forked_process(held_lock: ForkSafeLock) -> None:
    def takes_it() -> bool:
        with held_lock.held:
            return True

    assert exit_code_of_fork(takes_it) == 7


@FORKED
def test_a_forked_process_reads_what_its_parent_reads(six_layers: BuiltStore) -> None:
    cache, expected = open_cache(six_layers.path), padded(six_layers)
    cache.read(range(6))
    assert exit_code_of_fork(lambda: same_bits(cache.read(range(6))[LAST], expected.last)) == 7


def test_threads_end_when_they_are_closed_and_start_again() -> None:
    workers, used = Workers(3, "test"), set[threading.Thread]()
    for _ in range(2):
        used.clear()
        ran = threading.Semaphore(0)

        def note(ran: threading.Semaphore = ran) -> None:
            used.add(threading.current_thread())
            ran.release()

        for _ in range(6):
            workers.put(note)
        for _ in range(6):
            ran.acquire()
        assert threading.main_thread() not in used
        workers.close()
        assert not any(thread.is_alive() for thread in used)


def test_a_result_is_there_when_all_tasks_are_over_and_then_the_first_error_is_raised() -> None:
    pending = Pending(lambda: "made")
    pending.expect()
    pending.expect()
    pending.done()
    pending.done(OSError("first"))
    waiting = threading.Thread(target=pending.wait)
    waiting.start()
    assert waiting.is_alive()
    pending.done(OSError("second"))
    waiting.join()
    with pytest.raises(OSError, match="first"):
        pending.result()


def test_an_error_that_was_handled_leaves_nothing_behind() -> None:
    class Batch:
        """What a task holds."""

    batch = Batch()
    gone = weakref.ref(batch)
    pending = Pending(partial(str, batch))
    gc.disable()
    try:
        with pytest.raises(OSError, match="Batch"):
            fail_with(batch, pending)
        del batch
        assert gone() is None
    finally:
        gc.enable()


def fail_with(held: object, pending: Pending[str]) -> None:
    workers = Workers(1, "test")

    def fail() -> None:
        try:
            raise OSError(str(held))
        except OSError as error:
            pending.done(error)

    workers.put(fail)
    workers.close()
    pending.result()


def test_closing_does_not_lose_a_task_of_another_thread() -> None:
    workers, stop, ran = Workers(2, "test"), threading.Event(), threading.Semaphore(0)

    def close_again_and_again() -> None:
        while not stop.is_set():
            workers.close()

    closer = threading.Thread(target=close_again_and_again)
    closer.start()
    for _ in range(800):
        workers.put(ran.release)
    for _ in range(800):
        ran.acquire()
    stop.set()
    closer.join()
    workers.close()
