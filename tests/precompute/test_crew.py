"""What the ranks of a crew agree on, without process groups: those of a crew of one, and of stages that need none."""

import threading
from dataclasses import replace

import pytest

from dspark_store.format.schema import LAST, LAYERS
from dspark_store.format.shard import ObjectRecord
from dspark_store.precompute.crew import ControlGroups, Crew, own_objects
from dspark_store.precompute.ranks import World
from dspark_store.precompute.rendezvous import Keys
from dspark_store.precompute.watch import StoppedError, Watch
from dspark_store.target.parallel import ParallelPlan
from dspark_store.writers.states import FinishedObjects
from tests.writers.small_store import small_record

NUM_LAYERS = 4
SCHEMA = replace(small_record().schema.settled(8), layer_ids=(-1, 1, 3))


@pytest.fixture
def watch():
    with Watch(0, 1, None) as watch:
        yield watch


@pytest.fixture
def crews(watch):
    """Make the parts of all ranks of a job."""

    def make(plan, shards=(7, 8)):
        keys = Keys()
        worlds = [World(rank, plan.world_size, rank, keys, watch) for rank in range(plan.world_size)]
        return [Crew(world, plan, ControlGroups(None, None), SCHEMA, shards) for world in worlds]

    return make


def finished(items, stored):
    return FinishedObjects({item: ObjectRecord(10 + item.slot, 2**63 + item.slot) for item in items}, stored, (stored,))


def proceed():
    """Let a commit go on."""


def names(objects):
    return [item.name for item in objects]


def test_crews_take_each_shard_once_in_the_order_of_the_list(crews):
    one, other = crews(ParallelPlan(2), shards=(8, 7, 9))
    taken = [crew.next_shard() for crew in (one, other, other, one, other)]
    assert taken == [8, 7, 9, None, None]


def test_only_the_first_rank_of_a_crew_leads(crews):
    assert [crew.leads for crew in crews(ParallelPlan(4, pp=2))] == [True, False, True, False]


def test_a_rank_that_steps_alone_works_as_long_as_it_has_a_shard(crews):
    (crew,) = crews(ParallelPlan(1))
    assert [crew.any_works(works=works) for works in (True, False)] == [True, False]


def test_a_leader_publishes_what_every_stage_has_written(crews):
    leader, follower = crews(ParallelPlan(2, pp=2))
    shard = leader.next_shard()
    first, second = SCHEMA.state_objects[:2], SCHEMA.state_objects[2:]
    published: list[FinishedObjects] = []
    thread = threading.Thread(target=lambda: leader.commit(shard, finished(first, 5), published.extend, proceed))
    thread.start()
    follower.commit(shard, finished(second, 6), published.extend, proceed)  # which is not for it to do
    thread.join(20)
    assert published == [finished(first, 5), finished(second, 6)]


def test_a_leader_that_waits_for_a_part_ends_with_the_job(crews, watch):
    leader, _ = crews(ParallelPlan(2, pp=2))
    shard = leader.next_shard()
    watch.stop("rank 1: no space is left")
    with pytest.raises(StoppedError, match="rank 1: no space is left"):
        leader.commit(shard, finished((), 1), lambda parts: None, proceed)


def test_ranks_that_write_nothing_are_not_waited_for(crews):
    leader, follower = crews(ParallelPlan(2, tp=2))
    published: list[FinishedObjects] = []
    follower.commit(7, None, lambda parts: None, proceed)
    leader.commit(7, finished(SCHEMA.state_objects, 5), published.extend, proceed)
    assert published == [finished(SCHEMA.state_objects, 5)]


def test_a_replica_writes_every_object_and_of_a_tensor_parallel_crew_one_rank_does():
    assert own_objects(SCHEMA, ParallelPlan(2), 1, NUM_LAYERS) == list(SCHEMA.state_objects)
    assert own_objects(SCHEMA, ParallelPlan(2, tp=2), 1, NUM_LAYERS) == []


def test_stages_write_their_layers_the_first_the_embedding_and_the_last_the_last_states():
    plan = ParallelPlan(2, pp=2)
    stages = [own_objects(SCHEMA, plan, rank, NUM_LAYERS) for rank in range(2)]
    assert [[(item.column, item.layer_id) for item in stage] for stage in stages] == [
        [(LAYERS, -1), (LAYERS, 1)],
        [(LAYERS, 3), (LAST, None)],
    ]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_every_object_has_one_writer_whatever_the_stages(stages):
    plan = ParallelPlan(stages, pp=stages)
    written = [item for rank in range(stages) for item in own_objects(SCHEMA, plan, rank, NUM_LAYERS)]
    assert sorted(names(written)) == sorted(names(SCHEMA.state_objects))
