"""Workers share out shards by themselves, evenly, and no shard is ever committed twice."""

import heapq
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_store.precompute.board import LeaseError, ShardBoard, longest_first
from dspark_store.precompute.keyvalue import LocalKeys
from dspark_store.target.batches import forward_cost

LEASE = 10.0
STEPS = 4  # signs of progress that a shard gives
SAMPLES, BATCH = 8, 4
DISTRIBUTIONS = {
    "equal": lambda rng: 300,
    "uniform": lambda rng: rng.randint(1, 1024),
    "chats": lambda rng: min(1024, int(rng.lognormvariate(5, 1)) + 1),
    "mostly short": lambda rng: rng.choice([10, 20, 30, 900]),
}


class Clock:
    """Seconds that pass when told."""

    def __init__(self, start=0.0):
        self.now = start

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def boards(clock):
    """Make the views that some workers have of one board."""

    def make(workers=2, shards=(7, 8, 9)):
        keys = LocalKeys()
        return [ShardBoard(keys, shards, worker, workers, LEASE, clock) for worker in range(workers)]

    return make


def taken_after(board, clock, seconds):
    """Let a board look around while time passes; return the first shard that it gets."""
    board.take()
    for _ in range(int(seconds)):
        clock.now += 1
        shard = board.take()
        if shard is not None:
            return shard
    return None


def commit(board):
    claimed = board.claim()
    if claimed:
        board.done()
    return claimed


def test_the_longest_come_first_and_equal_ones_in_order():
    assert longest_first({0: 5, 1: 9, 2: 5, 3: 7}) == [1, 3, 0, 2]


def test_each_shard_is_taken_once_in_the_order_of_the_list(boards):
    one, other = boards()
    taken = [one.take(), other.take(), one.take()]
    assert taken == [7, 8, 9]
    assert other.take() is None


def test_a_board_is_finished_when_every_shard_is_committed(boards):
    one, other = boards(shards=(7, 8))
    one.take(), other.take()
    assert commit(one)
    assert not one.finished
    assert commit(other)
    assert one.finished
    assert other.finished


def test_a_board_without_shards_is_finished(boards):
    assert boards(shards=())[0].take() is None
    assert boards(shards=())[0].finished


def test_a_silent_workers_shard_is_taken_over_after_a_lease_and_not_before(boards, clock):
    silent, idle = boards(shards=(7,))
    silent.take()
    assert taken_after(idle, clock, LEASE - 1) is None
    assert taken_after(idle, clock, 2) == 7


def test_a_worker_that_shows_progress_keeps_its_shard(boards, clock):
    busy, idle = boards(shards=(7,))
    busy.take()
    for _ in range(5):
        assert taken_after(idle, clock, LEASE - 2) is None
        busy.progress()
    assert commit(busy)


def test_the_late_owner_of_a_lost_shard_cannot_claim_it(boards, clock):
    late, quick = boards(shards=(7,))
    late.take()
    assert taken_after(quick, clock, LEASE + 1) == 7
    late.progress()
    assert not late.claim()
    assert commit(quick)
    assert late.finished


def test_a_lost_shard_is_taken_over_by_one_worker_alone(boards, clock):
    silent, *idle = boards(workers=4, shards=(7,))
    silent.take()
    for board in idle:
        board.take()
    clock.now += LEASE + 1
    assert [board.take() for board in idle] == [7, None, None]


def test_the_lease_of_whoever_took_over_begins_anew(boards, clock):
    silent, second, third = boards(workers=3, shards=(7,))
    silent.take()
    third.take()
    assert taken_after(second, clock, LEASE + 1) == 7
    assert third.take() is None


def test_a_lease_doubles_with_each_loss_so_that_a_slow_shard_ends_at_last(boards, clock):
    one, other = boards(shards=(7,))
    one.take()
    assert taken_after(other, clock, LEASE + 1) == 7
    assert not one.claim()
    assert taken_after(one, clock, 2 * LEASE - 1) is None
    assert taken_after(one, clock, 2) == 7


def test_a_worker_that_has_the_same_shard_again_is_not_taken_for_silent_by_an_old_sight(boards, clock):
    first, second, third = boards(workers=3, shards=(7,))
    first.take()
    assert third.take() is None
    assert taken_after(second, clock, LEASE + 1) == 7
    assert not first.claim()
    assert taken_after(first, clock, 2 * LEASE + 1) == 7
    assert third.take() is None
    assert commit(first)


def test_a_worker_that_hangs_in_its_commit_is_an_error_for_the_others(boards, clock):
    hung, idle = boards(shards=(7,))
    hung.take()
    assert hung.claim()
    idle.take()
    clock.now += LEASE + 1
    with pytest.raises(LeaseError, match="worker 0 has been committing shard 7 for 11 s"):
        idle.take()


def test_a_commit_has_a_whole_lease_before_it(boards, clock):
    slow, idle = boards(shards=(7,))
    slow.take()
    assert taken_after(idle, clock, LEASE - 1) is None
    assert slow.claim()
    assert taken_after(idle, clock, LEASE - 1) is None
    slow.done()
    assert idle.finished


class Stopping(LocalKeys):
    """Keys of a worker that stops for ever at its ``last`` call."""

    def __init__(self, keys, last):
        self.__dict__ = keys.__dict__
        self.left = last

    def _count(self):
        self.left -= 1
        if self.left < 0:
            raise InterruptedError

    def set(self, key, value):
        self._count()
        LocalKeys.set(self, key, value)

    def add(self, key, count):
        self._count()
        return LocalKeys.add(self, key, count)

    def swap(self, key, expected, value):
        self._count()
        return LocalKeys.swap(self, key, expected, value)


@pytest.mark.parametrize("calls", range(6))
def test_a_worker_may_stop_between_any_two_steps_of_taking_a_shard(calls):
    keys, clock = LocalKeys(), Clock()
    stopped = ShardBoard(Stopping(keys, calls), (7, 8), 0, 2, LEASE, clock)
    other = ShardBoard(keys, (7, 8), 1, 2, LEASE, clock)
    if calls < 5:
        with pytest.raises(InterruptedError):
            stopped.take()
    else:
        stopped.take()
    committed = []
    while not other.finished and clock.now < 10 * LEASE:
        shard = other.take()
        if shard is not None and commit(other):
            committed.append(shard)
        clock.now += 1
    assert sorted(committed) == [7, 8]


class Interleaved(LocalKeys):
    """Keys that others use between any two calls of a worker."""

    def __init__(self, keys, between):
        self.__dict__ = keys.__dict__
        self._others_act = between

    def get(self, key):
        self._others_act()
        return LocalKeys.get(self, key)

    def set(self, key, value):
        self._others_act()
        LocalKeys.set(self, key, value)

    def add(self, key, count):
        self._others_act()
        return LocalKeys.add(self, key, count)

    def swap(self, key, expected, value):
        self._others_act()
        return LocalKeys.swap(self, key, expected, value)


class Trio:
    """A worker that is silent with shard 7, a thief about to take it, and a third; something happens in between."""

    def __init__(self, call, happens):
        self.clock, keys = Clock(), LocalKeys()
        self.silent, self.third = (ShardBoard(keys, (7,), worker, 3, LEASE, self.clock) for worker in (0, 1))
        self.thief = ShardBoard(Interleaved(keys, self._between), (7,), 2, 3, LEASE, self.clock)
        self._left, self._happens = -1, happens
        self.silent.take(), self.third.take(), self.thief.take()
        self.clock.now += LEASE + 1
        self._left = call

    def _between(self):
        self._left -= 1
        if self._left == -1:
            self._happens(self)

    def wait_and_take(self, board, seconds):
        return taken_after(board, self.clock, seconds)


@pytest.mark.parametrize("call", range(14))
def test_an_owner_that_commits_while_a_thief_reaches_for_its_shard_commits_alone(call):
    commits = []
    trio = Trio(call, lambda trio: commits.append(commit(trio.silent)))
    commits.append(trio.thief.take() is not None and commit(trio.thief))
    assert sum(commits) == 1


@pytest.mark.parametrize("call", range(14))
def test_of_two_thieves_of_one_shard_one_commits_it(call):
    commits = []
    trio = Trio(call, lambda trio: commits.append(trio.third.take() is not None and commit(trio.third)))
    commits.append(trio.thief.take() is not None and commit(trio.thief))
    assert sum(commits) == 1


@pytest.mark.parametrize("call", range(14))
def test_a_thief_with_an_old_sight_leaves_a_worker_alone_that_has_the_shard_again(call):
    back = []

    def lost_and_had_again(trio):
        if trio.third.take() is not None:
            trio.silent.claim()
            back.append(trio.wait_and_take(trio.silent, 2 * LEASE + 1))

    trio = Trio(call, lost_and_had_again)
    stolen = trio.thief.take()
    assert back == [7] or stolen == 7
    if back == [7]:
        assert stolen is None
        assert commit(trio.silent)


class Chaos:
    """Workers that are held up at any call while others go on, as a script of moves says: who acts, and when."""

    def __init__(self, workers, shards, script):
        self.script, self.clock = iter(script), Clock()
        keys = LocalKeys()
        self.boards = [
            ShardBoard(Interleaved(keys, self.others_act), range(shards), worker, workers, LEASE, self.clock)
            for worker in range(workers)
        ]
        self.phase = ["idle"] * workers
        self.held = [None] * workers
        self.acting, self.hung = set(), set()
        self.committed = []
        self.broken = False

    def others_act(self):
        move = next(self.script, None)
        if move is not None:
            self.move(*move)

    def move(self, worker, what, seconds):
        self.clock.now += seconds
        if what == "hang" and len(self.hung) < len(self.boards) - 1:
            self.hung.add(worker)
        elif worker not in self.acting | self.hung and not self.broken:
            self.act(worker, again=what == "work on")

    def act(self, worker, again=False):
        """Make one step of a worker's life; ``again`` lets it go on with its shard before it asks for the commit."""
        board, phase = self.boards[worker], self.phase[worker]
        self.acting.add(worker)
        try:
            if phase == "idle":
                self.held[worker] = board.take()
                self.phase[worker] = "idle" if self.held[worker] is None else "working"
            elif phase == "working" and again:
                board.progress()
            elif phase == "working":
                self.phase[worker] = "committing" if board.claim() else "idle"
            else:
                self.committed.append(self.held[worker])
                board.done()
                self.phase[worker] = "idle"
        except LeaseError:
            self.broken = True
        finally:
            self.acting.discard(worker)

    def finish(self):
        """Let every worker that does not hang go on to the end."""
        rounds = 0
        while not self.broken and not self.boards[0].finished:
            rounds += 1
            assert rounds < 5000, "the board never finishes"
            self.clock.now += 1
            for worker in set(range(len(self.boards))) - self.hung:
                self.act(worker)


moves = st.tuples(st.integers(0, 3), st.sampled_from(["act", "act", "work on", "hang"]), st.sampled_from([0, 1, 6, 25]))


@settings(max_examples=300)
@given(st.integers(2, 4), st.integers(1, 6), st.lists(moves, max_size=120))
def test_no_order_of_events_commits_a_shard_twice_or_forgets_one(workers, shards, script):
    chaos = Chaos(workers, shards, [move for move in script if move[0] < workers])
    for worker in range(workers):
        chaos.act(worker)
    chaos.finish()
    assert len(set(chaos.committed)) == len(chaos.committed)
    if not chaos.broken:
        assert sorted(chaos.committed) == list(range(shards))


def simulate(costs, speeds):
    """Run a job of workers of some speeds, each with a clock of its own; return when it ends."""
    keys, order = LocalKeys(), longest_first(dict(enumerate(costs)))
    clocks = [Clock(1000.0 * worker) for worker in range(len(speeds))]
    lease = 4 * max(costs) / min(speeds)
    boards = [ShardBoard(keys, order, worker, len(speeds), lease, clock) for worker, clock in enumerate(clocks)]
    events, steps, end = [(0.0, worker) for worker in range(len(speeds))], [0] * len(speeds), 0.0
    shards: list[Any] = [None] * len(speeds)
    committed: list[int] = []
    while events:
        now, worker = heapq.heappop(events)
        board, clocks[worker].now = boards[worker], 1000.0 * worker + now
        if shards[worker] is not None and steps[worker] < STEPS:
            steps[worker] += 1
            board.progress()
        elif shards[worker] is not None:
            assert commit(board)
            committed.append(shards[worker])
            end, shards[worker] = now, None
        if shards[worker] is None:
            shards[worker], steps[worker] = board.take(), 1
        if shards[worker] is not None:
            heapq.heappush(events, (now + costs[shards[worker]] / STEPS / speeds[worker], worker))
        elif not board.finished:
            heapq.heappush(events, (now + lease / 100, worker))
    assert sorted(committed) == list(range(len(costs)))
    return end


@settings(max_examples=60)
@given(st.sampled_from(sorted(DISTRIBUTIONS)), st.integers(16, 60), st.integers(0, 2**32))
def test_uneven_work_on_four_workers_ends_within_a_quarter_of_the_ideal(name, shards, seed):
    costs = costs_of(name, shards, random.Random(seed))
    ideal = max(sum(costs) / 4, *costs)
    assert simulate(costs, [1.0] * 4) <= 1.25 * ideal


@settings(max_examples=40)
@given(st.sampled_from(sorted(DISTRIBUTIONS)), st.integers(64, 100), st.integers(0, 2**32), st.integers(0, 3))
def test_a_worker_three_times_slower_holds_nobody_up(name, shards, seed, slow):
    costs, speeds = costs_of(name, shards, random.Random(seed)), [1.0] * 4
    speeds[slow] = 1 / 3
    ideal = max(sum(costs) / sum(speeds), max(costs) / min(speeds))
    assert simulate(costs, speeds) <= 1.25 * ideal


def costs_of(name, shards, rng):
    """Return the costs of shards of samples of random lengths, the longest samples all in one shard."""
    lengths = sorted(DISTRIBUTIONS[name](rng) for _ in range(shards * SAMPLES))
    heavy, rest = lengths[-SAMPLES:], lengths[:-SAMPLES]
    rng.shuffle(rest)
    parts = [rest[first : first + SAMPLES] for first in range(0, len(rest), SAMPLES)]
    parts.insert(rng.randrange(shards), heavy)
    return [forward_cost(part, BATCH) for part in parts]
