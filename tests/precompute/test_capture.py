"""Shards on their way through a target: a commit runs behind the next shard's forwards, and what fails in either."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from dspark_store.format.ledger import state_ledger
from dspark_store.format.storage import LocalStorage
from dspark_store.precompute.capture import CaptureContext, CaptureEvents, CaptureSettings, capture_shards
from dspark_store.precompute.copies import HostCopies
from dspark_store.precompute.crew import ControlGroups, Crew, own_objects
from dspark_store.precompute.ranks import World
from dspark_store.precompute.rendezvous import Keys
from dspark_store.precompute.report import Profile
from dspark_store.precompute.watch import Watch
from dspark_store.target.capture import StageStates
from dspark_store.target.parallel import ParallelPlan
from dspark_store.writers.pipeline import EncodePipeline
from tests.writers.small_store import BUFFER_BYTES, HIDDEN_SIZE, LAYER_IDS, small_record, write_tokens

CPU, ENOUGH_SECONDS = torch.device("cpu"), 60
LENGTHS = (7, 3, 5, 2) * 4
"""Four shards of two batches each."""


class TakingCrew(Crew):
    """A crew that tells before it takes a shard."""

    def __init__(self, *arguments, taking):
        super().__init__(*arguments)
        self._taking = taking

    def next_shard(self):
        self._taking()
        return super().next_shard()


@dataclass
class Capture:
    """A capture whose steps tests follow: ``told`` has forwards by number and commits by tokens, in order.

    ``on_forward`` is called in each forward with its number, from 0; ``on_commit`` whenever a commit asks to go on.
    """

    storage: LocalStorage
    plan: ParallelPlan = field(default_factory=lambda: ParallelPlan(1))
    told: list[object] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    """Commits that were done when each shard was taken."""
    on_forward: Callable[[int], object] | None = None
    on_commit: Callable[[], object] | None = None

    def run(self):
        record = small_record()
        record = replace(record, manifest={**record.manifest, "target_vocab_size": 1000})
        record = write_tokens(self.storage, record, LENGTHS)
        self.ledger = state_ledger(self.storage, record.schema)
        settings = CaptureSettings(CPU, 2, 0, 3, stop_on_nonfinite=False)
        objects = own_objects(record.schema, self.plan, 0, 4)
        with Watch(0, 1, None) as watch, EncodePipeline(2, BUFFER_BYTES) as pipeline:
            copies = HostCopies(CPU, torch.bfloat16)
            context = CaptureContext(self.storage, record, self.forward, settings, objects, pipeline, copies, Profile())
            world = World(0, self.plan.world_size, 0, Keys(), watch)
            crew = TakingCrew(world, self.plan, ControlGroups(None, None), record.schema, range(4), taking=self.taking)
            capture_shards(context, crew, CaptureEvents(self.told_nothing, self.committed, self.commits, lambda: None))

    def taking(self):
        self.taken.append(self.told.count("committed"))

    def forward(self, ids, attention):
        number = sum(isinstance(event, int) for event in self.told)
        self.told.append(number)
        if self.on_forward is not None:
            self.on_forward(number)
        states = [torch.ones(*ids.shape, HIDDEN_SIZE) for _ in range(len(LAYER_IDS))]
        return StageStates(tuple(range(len(states))), tuple(states), states[-1])

    def committed(self, tokens, stored_bytes):
        self.told.append("committed")

    def commits(self):
        if self.on_commit is not None:
            self.on_commit()

    def told_nothing(self, tokens):
        """Count no batch."""

    @property
    def done(self):
        return self.ledger.committed()


@pytest.fixture
def capture(tmp_path):
    return Capture(LocalStorage(tmp_path / "store"))


@pytest.fixture
def reached():
    """Events that forwards set: of the second shard's first and last, and of the third's first."""
    return {number: threading.Event() for number in (2, 3, 4)}


def follow(capture, reached):
    capture.on_forward = lambda number: reached[number].set() if number in reached else None


def wait_for(event):
    assert event.wait(ENOUGH_SECONDS)


def raise_error(error):
    raise error


def test_the_next_shards_forwards_run_before_a_commit_has_ended(capture, reached):
    follow(capture, reached)
    capture.on_commit = lambda: wait_for(reached[3])
    capture.run()
    assert capture.told.index("committed") > capture.told.index(3)
    assert capture.done == [0, 1, 2, 3]


def test_no_third_shard_is_begun_before_the_first_is_committed(capture, reached):
    follow(capture, reached)
    begun_too_early = []
    capture.on_commit = lambda: begun_too_early.append("committed" not in capture.told and reached[4].wait(0.2))
    capture.run()
    assert not any(begun_too_early)
    assert capture.taken[:2] == [0, 0]
    assert capture.taken[2] >= 1  # not even its tokens are read before
    assert capture.told.index("committed") < capture.told.index(4)


def test_a_commit_that_fails_behind_the_next_shard_ends_the_capture_and_nothing_later_is_visible(capture, reached):
    follow(capture, reached)

    def fail():
        wait_for(reached[3])
        raise OSError(28, "no space for shard 0")

    capture.on_commit = fail
    with pytest.raises(OSError, match="no space for shard 0"):
        capture.run()
    assert capture.told == [0, 1, 2, 3]
    assert capture.done == []
    assert [path.name for path in capture.storage.root.rglob("target_*/*") if path.name != "zarr.json"] == []


@pytest.mark.parametrize("error", [RuntimeError("planted"), KeyboardInterrupt()], ids=repr)
def test_what_ends_the_next_shards_forwards_loses_no_commit(capture, error):
    failing = threading.Event()

    def fail(number):
        if number == 3:
            failing.set()
            raise error

    capture.on_forward, capture.on_commit = fail, lambda: wait_for(failing)
    with pytest.raises(type(error)):
        capture.run()
    assert capture.done == [0]
    assert list(capture.storage.temporaries()) == []


def test_of_two_shards_that_fail_the_earlier_one_is_told(capture):
    failing = threading.Event()

    def fail_later(number):
        if number == 2:
            failing.set()
            raise ValueError("the second shard")

    def fail():
        wait_for(failing)
        raise OSError("the first shard")

    capture.on_forward, capture.on_commit = fail_later, fail
    with pytest.raises(OSError, match="the first shard"):
        capture.run()


def test_a_rank_that_fails_waits_for_no_part_of_another(capture):
    capture.plan = ParallelPlan(2, pp=2)  # whose second rank never comes
    capture.on_forward = lambda number: number == 3 and raise_error(RuntimeError("planted"))
    with pytest.raises(RuntimeError, match="planted"):
        capture.run()
    assert capture.done == []
