"""kill -9 at any instant of any rank, or all: the others end, and any number of workers goes on without loss."""

import random
import shutil
from collections import Counter
from dataclasses import dataclass

import pytest

from tests.crash.orders import Plant, Strike
from tests.crash.storm import KILLED, Storm, committed_states

pytestmark = pytest.mark.timeout(3600)
SEED = 21
BATCHES_A_SHARD, SHARDS_A_WORKER = 2, 2
_PACE_SECONDS = 0.05
_ENOUGH_SECONDS = 20


STORED = pytest.mark.parametrize("storm", [(), ("--dtype", "int8")], indirect=True, ids=["bf16", "int8"])


@pytest.fixture(scope="module")
def storm(request, tmp_path_factory):
    with Storm(tmp_path_factory.mktemp("storm"), samples=34, flags=getattr(request, "param", ())) as job:
        yield job


@dataclass
class Tally:
    """What the killed runs of one store came to, and what they may have: two shards per kill and worker more."""

    allowed: int
    forwards: int = 0
    kills: int = 0
    slowest: float = 0.0


def run_and_kill(storm, store, rng, tally):
    """Start a run with some workers, and kill one of them, or all, at a random instant; check what is left."""
    world = rng.randint(1, 4)
    victims = () if rng.random() < 0.3 else (rng.randrange(world),)
    captured = committed_states(store)
    pace = tuple(Plant(rank, "forward", "each", world * _PACE_SECONDS) for rank in range(world))
    strike = Strike(victims, after=rng.uniform(0, 1.2), met=True)
    outcome = storm.run(store, world=world, plants=pace, strike=strike)
    killed = outcome.exit_codes.count(KILLED)
    assert (outcome.ends.overdue, outcome.ends.left) == (False, 0), outcome.log
    assert killed <= (len(victims) or world), outcome.log
    if len(committed_states(store)) < len(storm.batches):
        assert killed, outcome.log
        assert all(outcome.exit_codes), outcome.log
    assert killed or not any(outcome.exit_codes), outcome.log
    assert captured.isdisjoint(outcome.shards)
    assert max(Counter(outcome.shards).values(), default=1) == 1
    assert len(set(outcome.shards) - committed_states(store)) <= SHARDS_A_WORKER * world
    tally.forwards += outcome.forwards
    tally.allowed += world * storm.calibration
    if killed:
        tally.kills += 1
        tally.allowed += world * SHARDS_A_WORKER * BATCHES_A_SHARD
        tally.slowest = max(tally.slowest, outcome.seconds_after(outcome.ends.struck))


def storm_of_kills(storm, store, kills, record_property):
    """Kill runs until as many were hit; every third is followed by one that finishes the store."""
    rng, done, forwards, slowest = random.Random(SEED), 0, 0, 0.0
    while done < kills:
        tally = Tally(storm.reference.forwards + 4 * storm.calibration)
        for _ in range(min(3, kills - done)):
            run_and_kill(storm, store, rng, tally)
        tally.forwards += storm.resume(store, world=rng.randint(1, 4)).forwards
        assert tally.forwards <= tally.allowed
        assert tally.slowest < _ENOUGH_SECONDS
        shutil.rmtree(store)
        done, forwards, slowest = done + tally.kills, forwards + tally.forwards, max(slowest, tally.slowest)
    record_property("kills", f"{done}, {forwards} forwards; the last rank ended at most {slowest:.1f} s after a kill")


@STORED
def test_workers_killed_at_random_instants_lose_at_most_two_shards_each(storm, tmp_path, record_property):
    storm_of_kills(storm, tmp_path / "store", 4, record_property)


@pytest.mark.storm
@STORED
def test_sixty_kills_of_workers_lose_at_most_two_shards_each(storm, tmp_path, record_property):
    storm_of_kills(storm, tmp_path / "store", 60, record_property)


@pytest.mark.storm
@STORED
def test_kills_of_ranks_that_share_a_target_end_all_of_them_and_lose_no_commit(storm, tmp_path):
    rng, store = random.Random(SEED), tmp_path / "store"
    for _ in range(16):
        size, kind = rng.randint(2, 4), rng.choice(("--fsdp-size", "--pp-size"))
        victims = () if rng.random() < 0.2 else (rng.randrange(size),)
        captured = committed_states(store)
        pace = tuple(Plant(rank, "forward", "each", 2 * _PACE_SECONDS) for rank in range(size))
        strike = Strike(victims, after=rng.uniform(0.3, 1.5), met=True)
        outcome = storm.run(store, kind, size, world=size, plants=pace, strike=strike)
        assert (outcome.ends.overdue, outcome.ends.left) == (False, 0), outcome.log
        assert captured.isdisjoint(outcome.shards)
        if len(committed_states(store)) < len(storm.batches):
            assert all(outcome.exit_codes), outcome.log
            assert outcome.seconds_after(outcome.ends.struck) < _ENOUGH_SECONDS
        if rng.random() < 0.5:
            storm.resume(store, world=rng.randint(1, 4))
            shutil.rmtree(store)
