"""Work is done ahead of its consumer, within a bound, and ends cleanly however the two part."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from dspark_store.readers.threads import Ahead, Pending, Prefetcher
from tests.processes import until


def prefetching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def work(count: int, nbytes: int = 1, make: Callable[[int], int] = lambda item: item) -> Iterator[Ahead[int]]:
    for item in range(count):
        yield Ahead(nbytes, lambda item=item: Pending.of(make(item)))  # type: ignore[misc]  # a bound default


def test_items_come_in_order_and_no_thread_is_left() -> None:
    assert list(Prefetcher(work(100), 10)) == list(range(100))
    assert not prefetching()


def test_nothing_to_do_ends_at_once() -> None:
    assert list(Prefetcher(work(0), 10)) == []
    assert not prefetching()


@pytest.mark.parametrize(("nbytes", "limit", "ahead"), [(1, 4, 4), (3, 10, 3), (10, 1, 1)])
def test_items_ahead_stay_within_the_bytes_allowed(nbytes, limit, ahead) -> None:
    made: list[int] = []

    def make(item: int) -> int:
        made.append(item)
        return item

    running = Prefetcher(work(50, nbytes, make), limit)
    until(lambda: len(made) >= ahead)
    time.sleep(0.02)
    assert len(made) == ahead
    assert next(running) == 0
    until(lambda: len(made) >= ahead + 1)
    running.close()
    assert not prefetching()


def test_an_error_comes_in_the_place_of_the_item_that_failed() -> None:
    running = Prefetcher(work(9, make=lambda item: 1 // (3 - item)), 100)
    assert [next(running) for _ in range(3)] == [0, 0, 1]
    with pytest.raises(ZeroDivisionError) as caught:
        next(running)
    assert "<lambda>" in [entry.name for entry in caught.traceback]
    assert not prefetching()


def test_an_error_of_the_plan_comes_through_as_well() -> None:
    def broken() -> Iterator[Ahead[int]]:
        yield Ahead(1, lambda: Pending.of(7))
        raise OSError("no plan")

    running = Prefetcher(broken(), 100)
    assert next(running) == 7
    with pytest.raises(OSError, match="no plan"):
        next(running)


def test_after_an_error_or_the_end_it_is_over() -> None:
    running = Prefetcher(work(1, make=lambda item: 1 // item), 100)
    with pytest.raises(ZeroDivisionError):
        next(running)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(running)


def test_closing_drops_what_was_made_and_waits_for_the_thread() -> None:
    running = Prefetcher(work(50), 10)
    next(running)
    running.close()
    running.close()
    assert not prefetching()
    with pytest.raises(StopIteration):
        next(running)


def test_closing_waits_for_the_item_in_the_making() -> None:
    making, done = threading.Event(), []

    def slow(item: int) -> int:
        making.set()
        time.sleep(0.05)
        done.append(item)
        return item

    running = Prefetcher(work(5, make=slow), 100)
    making.wait()
    running.close()
    assert done == [0]
    assert not prefetching()


def test_the_consumer_may_be_closed_from_another_thread() -> None:
    blocked = threading.Event()
    running = Prefetcher(work(5, make=lambda item: blocked.wait() and item), 100)
    closer = threading.Thread(target=running.close)
    closer.start()
    threading.Timer(0.02, blocked.set).start()
    assert list(running) == []
    closer.join()
    assert not prefetching()


def test_an_interrupt_while_waiting_ends_the_thread(monkeypatch) -> None:
    running = Prefetcher(work(5), 1)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(running._changed, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(running)
    assert not prefetching()
