"""Who a rank is, and how ranks agree."""

import json
import threading
from contextlib import ExitStack

import pytest

from dspark_store.precompute.ranks import World, join_world, leave_together, local_rank
from dspark_store.precompute.rendezvous import Keys
from dspark_store.precompute.watch import StoppedError, Watch
from dspark_store.text import one_line
from dspark_store.writers.lock import LostLockError

LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
TORCHRUN = ("WORLD_SIZE", "RANK", *LOCAL_RANKS, "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def worlds():
    """Two ranks in one process, with what they share."""
    keys = Keys()
    with Watch(0, 1, None) as watch:
        yield [World(rank, 2, rank, keys, watch) for rank in range(2)]


def test_without_torchrun_a_process_is_a_job_of_its_own():
    with join_world() as world:
        assert (world.rank, world.size, world.leads, world.rendezvous) == (0, 1, True, None)


def test_an_error_of_a_lone_process_is_its_own():
    with pytest.raises(KeyError), join_world():
        raise KeyError


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', not a whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0, expected at least 1"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 but RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "x"}, "WORLD_SIZE is 2 but MASTER_PORT is not set"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "RANK is 2, expected 0 to 1"),
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "x", "MASTER_PORT": "y"}, "MASTER_PORT is 'y', not a whole"),
    ],
)
def test_half_a_job_in_the_environment_is_refused(environment, message, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message) as caught, join_world():
        pass
    assert "start the job with torchrun" in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "number"),
    [({}, None), ({"SLURM_LOCALID": "3"}, 3), ({"SLURM_LOCALID": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, 2)],
)
def test_a_rank_knows_its_number_on_its_host_from_whoever_started_it(environment, number, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert local_rank() == number


def test_what_rank_0_shares_is_received(worlds):
    leader, follower = worlds
    received = []
    thread = threading.Thread(target=lambda: received.append(follower.receive("plan")))
    thread.start()
    assert leader.share("plan", lambda: {"shards": [1, 2], "done": None}) == {"shards": [1, 2], "done": None}
    thread.join(20)
    assert received == [{"shards": [1, 2], "done": None}]


def test_a_wait_ends_when_the_job_does(worlds):
    _, follower = worlds
    follower.watch.stop("rank 0: no space is left")
    with pytest.raises(StoppedError, match="rank 0: no space is left"):
        follower.receive("never")


def test_a_wait_returns_the_first_answer_that_is_one(worlds):
    answers = iter([None, None, 0, 1])
    assert worlds[0].wait_for(lambda: next(answers)) == 0


def test_two_scopes_of_a_world_share_nothing(worlds):
    leader, follower = worlds
    leader.scoped("smoke").share("begun", lambda: 1)
    assert follower.scoped("store").keys.get("begun") is None
    assert follower.scoped("smoke").receive("begun") == 1


def test_others_hear_of_an_error_before_what_is_around_its_block_is_undone():
    keys, told = Keys(), []
    keys.set("heard/1", "1")

    def fail(world):
        with ExitStack() as around:
            around.callback(lambda: told.append(json.loads(keys.get("failure") or "null")))
            around.enter_context(world.failing_together())
            raise ValueError("no such row")

    with Watch(0, 2, keys) as watch, pytest.raises(ValueError, match="no such row"):
        fail(World(0, 2, 0, Keys(), watch))
    assert told == [{"rank": 0, "message": "no such row"}]


def test_an_error_that_a_lost_peer_may_have_caused_waits_for_the_failure_that_did():
    keys, error = Keys(), ValueError("cannot load the weights")
    error.__cause__ = RuntimeError("connection closed by peer")
    failure = json.dumps({"rank": 0, "message": "no space is left"})
    late = threading.Timer(0.05, keys.setdefault, ("failure", failure))
    late.start()
    world = World(1, 2, 1, Keys(), Watch(1, 2, keys))
    with pytest.raises(StoppedError, match=r"^rank 0: no space is left$"), world.failing_together():
        raise error
    late.join()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("two\n  lines"), "two lines"),
        (OSError(28, "No space left on device", "a"), "No space left on device: 'a'"),
        (StoppedError("rank 1: gone", 1), "rank 1: gone"),
        (ValueError(), "ValueError: no reason given"),
        (KeyError("x"), "KeyError: 'x'"),
        (KeyboardInterrupt(), "interrupted"),
        (LostLockError("taken over; this one ends"), "taken over; this one ends"),
    ],
)
def test_an_error_is_told_in_one_line(error, line):
    assert one_line(error) == line


def test_a_rank_that_never_ends_does_not_keep_the_others_for_ever(worlds):
    with pytest.raises(StoppedError, match="the job is done, but a rank has not ended within 0 s"):
        leave_together(worlds[0], seconds=0.05)
