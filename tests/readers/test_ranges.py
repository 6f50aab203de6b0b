"""The first stage takes requests up to a bound, and goes on as they are released."""

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from dspark_store.format.objects import StoredObject
from dspark_store.readers.ranges import IN_FLIGHT_BYTES, LocalRanges, ObjectName, Range

LIMIT = 60


class Asked:
    """A request that reads nothing, says when it came, and is decoded when it may be."""

    lock = threading.Lock()
    decoding = most = 0

    def __init__(self, nbytes: int = 1) -> None:
        self.name: ObjectName = ("input_ids", 0, 0)
        self.nbytes = nbytes
        self.came, self.may_go = threading.Event(), threading.Event()
        self.error: BaseException | None = None

    def ranges(self, stored: object) -> Sequence[Range]:
        return ()

    def arrived(self, error: BaseException | None) -> None:
        self.error = error
        with Asked.lock:
            Asked.decoding += 1
            Asked.most = max(Asked.most, Asked.decoding)
        self.came.set()
        assert self.may_go.wait(LIMIT)
        with Asked.lock:
            Asked.decoding -= 1


@pytest.fixture
def stage():
    opened = cast(StoredObject, SimpleNamespace(tail=SimpleNamespace(nbytes=0)))
    ranges = LocalRanges(lambda name: opened, threads=2, in_flight=3, open_objects=4)
    yield ranges
    ranges.close()


def submitted(stage: LocalRanges, request: Asked) -> threading.Thread:
    thread = threading.Thread(target=stage.submit, args=(request,))
    thread.start()
    return thread


def test_twice_as_many_requests_as_are_in_flight_are_taken_and_few_decoded_at_once(stage):
    taken, late = [Asked() for _ in range(6)], Asked()
    for request in taken:
        stage.submit(request)
    thread = submitted(stage, late)
    assert all(request.came.wait(LIMIT) for request in taken[:2])
    assert not late.came.is_set()
    assert thread.is_alive()
    for request in (*taken, late):
        request.may_go.set()
    assert late.came.wait(LIMIT)
    thread.join(LIMIT)
    assert [request.error for request in (*taken, late)] == [None] * 7
    assert Asked.most == 2


def test_a_request_larger_than_the_bound_is_taken_when_nothing_else_is(stage):
    small, large = Asked(), Asked(2 * IN_FLIGHT_BYTES)
    stage.submit(small)
    thread = submitted(stage, large)
    assert small.came.wait(LIMIT)
    assert not large.came.is_set()
    small.may_go.set()
    large.may_go.set()
    assert large.came.wait(LIMIT)
    thread.join(LIMIT)


def test_an_object_that_does_not_open_is_the_requests_error():
    def missing(name: object) -> StoredObject:
        raise FileNotFoundError(2, "gone")

    stage = LocalRanges(missing, threads=1, in_flight=1, open_objects=1)
    request = Asked()
    request.may_go.set()
    stage.submit(request)
    assert request.came.wait(LIMIT)
    assert isinstance(request.error, FileNotFoundError)
    stage.close()
