import threading
import time
import weakref
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_store.format.codecs import EncodedChunk
from dspark_store.writers.pipeline import BufferPool, EncodePipeline


def chunk(number):
    return EncodedChunk(bytes([number]), number)


def slow_chunk(number, seconds=0.0):
    time.sleep(seconds)
    return chunk(number)


def fail(message):
    raise OSError(message)


class Gate:
    """A task that waits until it is opened."""

    def __init__(self):
        self.opened = threading.Event()

    def __call__(self):
        assert self.opened.wait(30)
        return chunk(0)


def finishes_within(seconds, call):
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


@settings(max_examples=25)
@given(st.lists(st.floats(0, 0.002), max_size=30), st.integers(1, 4), st.integers(1, 40))
def test_chunks_arrive_in_the_order_of_submission(delays, threads, buffer_bytes):
    arrived: list[EncodedChunk] = []
    with EncodePipeline(threads, buffer_bytes) as pipeline:
        for number, seconds in enumerate(delays):
            pipeline.submit(partial(slow_chunk, number, seconds), 10, arrived.append)
        pipeline.flush()
        assert [encoded.crc for encoded in arrived] == list(range(len(delays)))


def test_tasks_run_at_the_same_time():
    meeting = threading.Barrier(3)

    def meet():
        meeting.wait(30)
        return chunk(0)

    with EncodePipeline(3, 100) as pipeline:
        for _ in range(3):
            pipeline.submit(meet, 1, lambda _: None)
        pipeline.flush()


def test_submit_waits_while_the_buffer_is_full():
    gate = Gate()
    with EncodePipeline(2, 100) as pipeline:
        pipeline.submit(gate, 60, lambda _: None)
        pipeline.submit(partial(chunk, 1), 40, lambda _: None)
        third = partial(pipeline.submit, partial(chunk, 2), 1, lambda _: None)
        thread = threading.Thread(target=third)
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        gate.opened.set()
        thread.join(30)
        assert not thread.is_alive()


def test_a_chunk_larger_than_the_buffer_goes_alone():
    arrived: list[EncodedChunk] = []
    with EncodePipeline(2, 10) as pipeline:
        for number in range(3):
            pipeline.submit(partial(chunk, number), 1000, arrived.append)
        pipeline.flush()
    assert len(arrived) == 3


@pytest.mark.parametrize("ask", ["submit", "flush"])
def test_the_error_of_a_task_is_raised_at_the_next_call(ask):
    with EncodePipeline(2, 100) as pipeline:
        pipeline.submit(partial(fail, "no room"), 1, lambda _: None)
        with pytest.raises(OSError, match="no room"):
            ask_until_it_raises(pipeline, ask)


@pytest.mark.parametrize("ask", ["submit", "flush"])
def test_the_error_of_a_sink_is_raised_at_the_next_call(ask):
    with EncodePipeline(2, 100) as pipeline:
        pipeline.submit(partial(chunk, 0), 1, lambda _: fail("disk gone"))
        with pytest.raises(OSError, match="disk gone"):
            ask_until_it_raises(pipeline, ask)


def ask_until_it_raises(pipeline, ask):
    for _ in range(3000):
        if ask == "flush":
            pipeline.flush()
        else:
            pipeline.submit(partial(chunk, 1), 1, lambda _: None)
        time.sleep(0.001)


def test_nothing_behind_an_error_reaches_a_sink():
    arrived: list[EncodedChunk] = []
    gate = Gate()
    with EncodePipeline(2, 100) as pipeline:
        pipeline.submit(gate, 1, lambda _: fail("disk gone"))
        for number in range(5):
            pipeline.submit(partial(chunk, number), 1, arrived.append)
        gate.opened.set()
        with pytest.raises(OSError, match="disk gone"):
            pipeline.flush()
    assert arrived == []


def test_an_error_wakes_a_submit_that_waits_for_room():
    gate = Gate()
    raised: list[str] = []

    def submit_into_a_full_buffer():
        try:
            pipeline.submit(partial(chunk, 1), 100, lambda _: None)
        except OSError as error:
            raised.append(str(error))

    with EncodePipeline(1, 100) as pipeline:
        pipeline.submit(gate, 100, lambda _: fail("disk gone"))
        thread = threading.Thread(target=submit_into_a_full_buffer)
        thread.start()
        gate.opened.set()
        thread.join(30)
    assert raised == ["disk gone"]


def test_after_a_reset_the_pipeline_is_good_again():
    arrived: list[EncodedChunk] = []
    with EncodePipeline(2, 100) as pipeline:
        pipeline.submit(partial(fail, "no room"), 1, lambda _: None)
        pipeline.reset()
        pipeline.submit(partial(chunk, 7), 1, arrived.append)
        pipeline.flush()
    assert [encoded.crc for encoded in arrived] == [7]


def test_close_ends_all_threads():
    before = set(threading.enumerate())
    pipeline = EncodePipeline(3, 100)
    for number in range(5):
        pipeline.submit(partial(chunk, number), 1, lambda _: None)
    assert set(threading.enumerate()) != before
    assert finishes_within(30, pipeline.close)
    assert set(threading.enumerate()) == before


def test_close_ends_all_threads_after_an_error():
    before = set(threading.enumerate())
    pipeline = EncodePipeline(2, 100)
    pipeline.submit(partial(fail, "no room"), 1, lambda _: None)
    with pytest.raises(OSError, match="no room"):
        pipeline.flush()
    pipeline.close()
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize(("threads", "buffer_bytes"), [(0, 1), (1, 0)])
def test_a_pipeline_without_threads_or_room_is_refused(threads, buffer_bytes):
    with pytest.raises(ValueError, match="must be >= 1"):
        EncodePipeline(threads, buffer_bytes)


def test_the_seconds_of_tasks_and_sinks_are_added_up():
    with EncodePipeline(2, 100) as pipeline:
        for number in range(2):
            pipeline.submit(partial(slow_chunk, number, 0.03), 1, lambda _: time.sleep(0.02))
        pipeline.flush()
        assert pipeline.encode_seconds >= 0.06
        assert pipeline.write_seconds >= 0.04
        pipeline.submit(partial(fail, "no room"), 1, lambda _: None)
        pipeline.reset()


def test_a_pipeline_that_did_nothing_has_spent_no_time():
    with EncodePipeline(1, 1) as pipeline:
        pipeline.flush()
        assert (pipeline.encode_seconds, pipeline.write_seconds) == (0, 0)


def test_what_a_sink_was_given_is_let_go_when_it_has_returned():
    results: weakref.WeakSet[threading.Event] = weakref.WeakSet()

    def result():
        made = threading.Event()
        results.add(made)
        return made

    with EncodePipeline(2, 100) as pipeline:
        pipeline.submit(result, 1, lambda _: None)
        pipeline.flush()
        assert not results


def test_a_reset_waits_for_what_is_under_way():
    gate = Gate()
    arrived: list[EncodedChunk] = []
    with EncodePipeline(1, 100) as pipeline:
        pipeline.submit(gate, 1, arrived.append)
        thread = threading.Thread(target=pipeline.reset)
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
        gate.opened.set()
        thread.join(30)
    assert len(arrived) == 1


def fail_once(owner, call, error, *, late):
    """Have the next call of a part of the pipeline fail, ``late`` or before it has done anything."""
    good = getattr(owner, call)

    def fail(*args):
        setattr(owner, call, good)
        if late:
            good(*args)
        raise error

    setattr(owner, call, fail)


@pytest.mark.parametrize("ask", ["reset", "flush"])
@pytest.mark.parametrize(
    ("part", "call", "error", "late"),
    [
        ("_pool", "submit", RuntimeError("can't start new thread"), False),
        ("_pool", "submit", KeyboardInterrupt(), True),
        (None, "_put", KeyboardInterrupt(), False),
        (None, "_put", KeyboardInterrupt(), True),
    ],
)
def test_a_submit_that_fails_midway_leaves_nothing_to_wait_for(part, call, error, late, ask):
    arrived: list[EncodedChunk] = []
    with EncodePipeline(1, 100) as pipeline:
        pipeline.submit(partial(chunk, 1), 60, arrived.append)
        fail_once(getattr(pipeline, part) if part else pipeline, call, error, late=late)
        with pytest.raises(type(error)):
            pipeline.submit(partial(chunk, 2), 60, arrived.append)
        assert finishes_within(10, getattr(pipeline, ask))
        assert finishes_within(10, partial(pipeline.submit, partial(chunk, 3), 60, arrived.append))
        pipeline.flush()
    assert [encoded.crc for encoded in arrived] == ([1, 2, 3] if call == "_put" and late else [1, 3])


def test_threads_that_submit_at_the_same_time_share_the_room():
    under_way, most, lock = [0], [0], threading.Lock()

    def enter():
        with lock:
            under_way[0] += 40
            most[0] = max(most[0], under_way[0])
        return chunk(0)

    def leave(_):
        with lock:
            under_way[0] -= 40

    def submit_some():
        for _ in range(50):
            pipeline.submit(enter, 40, leave)

    with EncodePipeline(4, 100) as pipeline:
        threads = [threading.Thread(target=submit_some) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        pipeline.flush()
    assert (under_way[0], most[0] <= 100) == (0, True)


def test_a_closed_pipeline_has_nothing_to_wait_for():
    with EncodePipeline(1, 100) as pipeline:
        pass
    assert finishes_within(10, pipeline.reset)
    assert finishes_within(10, pipeline.flush)


def test_buffers_are_used_again_and_others_are_forgotten():
    pool = BufferPool()
    first = pool.acquire(64)
    assert pool.acquire(64) is not first
    pool.release(first)
    assert pool.acquire(64) is first
    pool.release(first)
    assert pool.acquire(32).size == 32
    assert pool.acquire(64) is not first
