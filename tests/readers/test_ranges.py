"""The first stage takes requests up to a bound, and goes on as they are released."""

import threading
from collections.abc import Sequence
from typing import cast

import pytest

from dspark_store.format.objects import StoredObject
from dspark_store.readers.ranges import IN_FLIGHT_BYTES, LocalRanges, ObjectName, Range

LIMIT = 60


class Asked:
    """A request that reads nothing, and says when it came."""

    def __init__(self, nbytes: int = 1) -> None:
        self.name: ObjectName = ("input_ids", 0, 0)
        self.nbytes = nbytes
        self.came = threading.Event()
        self.error: BaseException | None = None

    def ranges(self, stored: object) -> Sequence[Range]:
        return ()

    def arrived(self, error: BaseException | None) -> None:
        self.error = error
        self.came.set()


@pytest.fixture
def stage():
    ranges = LocalRanges(lambda name: cast(StoredObject, object()), in_flight=2, open_objects=4)
    yield ranges
    ranges.close()


def submitted(stage: LocalRanges, request: Asked) -> threading.Thread:
    thread = threading.Thread(target=stage.submit, args=(request,))
    thread.start()
    return thread


def test_twice_as_many_requests_as_are_in_flight_are_taken_before_one_is_released(stage):
    taken = [Asked() for _ in range(4)]
    for request in taken:
        stage.submit(request)
        assert request.came.wait(LIMIT)
    late = Asked()
    thread = submitted(stage, late)
    stage.release(1)
    assert not late.came.is_set()  # three are still kept: no room for several at once
    stage.release(1)
    assert late.came.wait(LIMIT)
    thread.join(LIMIT)
    assert [request.error for request in (*taken, late)] == [None] * 5


def test_a_request_larger_than_the_bound_is_taken_when_nothing_else_is(stage):
    small, large = Asked(), Asked(2 * IN_FLIGHT_BYTES)
    stage.submit(small)
    thread = submitted(stage, large)
    assert small.came.wait(LIMIT)
    assert not large.came.is_set()
    stage.release(1)
    assert large.came.wait(LIMIT)
    thread.join(LIMIT)


def test_an_object_that_does_not_open_is_the_requests_error():
    def missing(name: object) -> StoredObject:
        raise FileNotFoundError(2, "gone")

    stage = LocalRanges(missing, in_flight=1, open_objects=1)
    request = Asked()
    stage.submit(request)
    assert request.came.wait(LIMIT)
    assert isinstance(request.error, FileNotFoundError)
    stage.close()
