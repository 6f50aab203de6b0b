"""kill -9 at any instant of a precompute, and --resume: nothing is lost, nothing is left, nothing is done twice."""

import random
import shutil

import pytest

from dspark_store import open_cache
from tests.crash.orders import Strike
from tests.crash.storm import KILLED, Storm, committed_states

pytestmark = pytest.mark.timeout(3600)
SEED, SHARDS_UNDER_WAY = 20, 2
TIED = pytest.mark.parametrize("storm", [{}, {"tied": True}], indirect=True, ids=["untied", "tied"])
STORED = pytest.mark.parametrize("storm", [{}, {"flags": ("--dtype", "int8")}], indirect=True, ids=["bf16", "int8"])


@pytest.fixture(scope="module")
def storm(request, tmp_path_factory):
    with Storm(tmp_path_factory.mktemp("storm"), **getattr(request, "param", {})) as job:
        yield job


@pytest.fixture
def store(storm, tmp_path):
    yield tmp_path / "store"
    shutil.rmtree(tmp_path / "store", ignore_errors=True)


def spread(count, last):
    """Return ``count`` numbers from 1 to ``last``, evenly spread."""
    return sorted({1 + round(index * (last - 1) / (count - 1)) for index in range(count)})


def kill_at_each(storm, store, steps):
    for step in steps:
        outcome = storm.run(store, kill_at=step)
        assert outcome.exit_code == KILLED, f"step {step}: {outcome.log}"
        assert outcome.calls == step
        assert len(set(outcome.shards) - committed_states(store)) <= SHARDS_UNDER_WAY
        storm.resume(store)
        shutil.rmtree(store)


def kill_at_random_instants(storm, store, kills):
    """Kill at instants that are uniform over an undisturbed run; some kills hit a store that was killed before."""
    rng = random.Random(SEED)
    for kill in range(kills):
        captured = committed_states(store)
        outcome = storm.run(store, strike=Strike(after=rng.uniform(0, storm.reference.seconds)))
        assert outcome.exit_code in (KILLED, 0), outcome.log
        assert captured.isdisjoint(outcome.shards)
        assert len(set(outcome.shards) - committed_states(store)) <= SHARDS_UNDER_WAY
        if kill % 3 == 2:
            storm.resume(store)
            shutil.rmtree(store)
    if store.exists():
        storm.resume(store)


def test_the_undisturbed_run_captures_every_shard_once(storm):
    storm.check_only_missing_shards_ran(storm.reference, set())
    assert len(open_cache(storm.whole)) == 10


def test_a_second_run_on_a_finished_store_changes_nothing(storm):
    before = {path: path.stat().st_mtime_ns for path in storm.whole.rglob("*")}
    outcome = storm.run(storm.whole)
    assert (outcome.exit_code, outcome.calls, outcome.forwards) == (0, 0, 0)
    assert {path: path.stat().st_mtime_ns for path in storm.whole.rglob("*")} == before


@STORED
def test_a_kill_at_some_publish_steps_loses_and_leaves_nothing(storm, store):
    kill_at_each(storm, store, spread(6, storm.reference.calls))


@STORED
def test_kills_at_random_instants_lose_and_leave_nothing(storm, store):
    kill_at_random_instants(storm, store, 6)


def test_a_store_that_is_killed_again_and_again_still_ends_up_whole(storm, store):
    for step in (40, 60, 70, 80):
        captured = committed_states(store)
        outcome = storm.run(store, kill_at=step)
        assert outcome.exit_code == KILLED, outcome.log
        assert captured.isdisjoint(outcome.shards)
    storm.resume(store)


@pytest.mark.storm
@STORED
def test_a_kill_at_every_publish_step_loses_and_leaves_nothing(storm, store):
    kill_at_each(storm, store, range(1, storm.reference.calls + 1))


@pytest.mark.storm
@TIED
def test_forty_kills_at_random_instants_lose_and_leave_nothing(storm, store):
    kill_at_random_instants(storm, store, 40)


@pytest.mark.storm
def test_chains_of_kills_at_random_publish_steps_lose_and_leave_nothing(storm, store):
    rng = random.Random(SEED)
    for _ in range(10):
        for _ in range(rng.randint(2, 5)):
            storm.run(store, kill_at=rng.randint(1, storm.reference.calls // 2))
        storm.resume(store)
        shutil.rmtree(store)
