"""What ends one rank ends all, soon, with that rank's message; and what is committed stays for the next run."""

import re
import signal

import pytest

from dspark_store import open_cache
from dspark_store.target.batches import forward_cost
from tests.crash.orders import Plant, Strike
from tests.precompute.jobs import BATCH_SIZE
from tests.precompute.rank_jobs import SHARDS

pytestmark = pytest.mark.timeout(900)
ENOUGH_SECONDS, PREEMPTION_SECONDS = 20, 10
BEFORE_SHARDS = ("load", "tokenise")
FSDP, PP, EP = ("--fsdp-size", 3), ("--pp-size", 3), ("--ep-size", 3)
FEW = [((), "load", 1), ((), "commit", 1), (FSDP, "forward", 1)]
"""Flags, stage and the rank that fails in it, of three: the middle one where it comes to that stage."""

ALL = [
    *(((), stage, 1) for stage in ("forward", "encode", "write", "finish")),
    *(((), stage, 0) for stage in ("tokenise", "publish")),
    *((FSDP, stage, 1) for stage in ("load", "encode", "write", "finish", "commit")),
    *((PP, stage, 1) for stage in ("load", "forward", "encode", "write", "finish")),
    *((EP, stage, 1) for stage in ("load", "forward")),
    *((EP, stage, 0) for stage in ("encode", "write", "finish")),
    *((flags, stage, 0) for flags in (PP, EP) for stage in ("commit", "publish")),
]


def check_resumes(jobs, store):
    """Check that nothing blocks the next run, and that it makes the store that nobody disturbed."""
    assert not (store / ".writer.lock").exists()
    jobs.run(store, "--resume", world=2)
    jobs.assert_equals_whole(store)


def check_failure(jobs, store, flags, stage, rank):
    gate = stage not in BEFORE_SHARDS
    outcome = jobs.start(store, *flags, world=3, plants=jobs.failing(stage, rank), gate=gate).wait()
    assert outcome.exit_codes == [3, 3, 3], outcome.log
    assert (outcome.ends.overdue, outcome.ends.left) == (False, 0)
    assert outcome.seconds_after(outcome.planted) < ENOUGH_SECONDS
    for number, log in enumerate(outcome.logs):
        assert f"rank {rank}: RuntimeError: planted in {stage} of rank {rank}" in log, f"rank {number}: {log}"
        assert "Traceback" not in log
    check_resumes(jobs, store)


@pytest.mark.parametrize(("flags", "stage", "rank"), FEW, ids=str)
def test_a_failure_on_one_rank_ends_all_with_its_message(jobs, tmp_path, flags, stage, rank):
    check_failure(jobs, tmp_path / "store", flags, stage, rank)


@pytest.mark.storm
@pytest.mark.parametrize(("flags", "stage", "rank"), ALL, ids=str)
def test_a_failure_in_any_stage_of_any_kind_of_job_ends_all_with_its_message(jobs, tmp_path, flags, stage, rank):
    check_failure(jobs, tmp_path / "store", flags, stage, rank)


def test_a_mistake_that_rank_0_finds_before_the_others_have_work_ends_all_with_one_line(jobs, tmp_path):
    data = tmp_path / "bad.jsonl"
    data.write_text('{"messages": 3}\n')
    outcome = jobs.start(tmp_path / "store", "--input-data", data, world=3).wait()
    assert outcome.exit_codes == [2, 3, 3]
    line = f"{data}, line 1: messages must be a list of at least one message, got 3"
    assert [f"rank 0: {line}" in log for log in outcome.logs] == [True] * 3
    assert outcome.seconds < ENOUGH_SECONDS
    assert not (tmp_path / "store").exists()


@pytest.mark.storm
def test_a_rank_that_hangs_while_another_fails_is_ended(jobs, tmp_path):
    plants = (Plant(1, "forward", "sleep", 60), Plant(2, "forward"))
    outcome = jobs.start(tmp_path / "store", *FSDP, world=3, plants=plants, gate=True).wait()
    assert outcome.exit_codes == [3, 3, 3], outcome.log
    assert outcome.seconds_after(outcome.planted) < ENOUGH_SECONDS
    assert ["rank 2: RuntimeError: planted in forward" in log for log in outcome.logs] == [True] * 3
    check_resumes(jobs, tmp_path / "store")


@pytest.mark.parametrize(
    ("flags", "victim"),
    [(FSDP, 1), *(pytest.param(flags, 0, marks=pytest.mark.storm) for flags in ((), FSDP, PP, EP))],
    ids=str,
)
def test_when_a_rank_is_killed_the_others_end(jobs, tmp_path, flags, victim):
    pace = tuple(Plant(rank, "forward", "each", 0.1) for rank in range(3))
    outcome = jobs.start(
        tmp_path / "store", *flags, world=3, plants=pace, strike=Strike((victim,), event="forward"), gate=True
    ).wait()
    assert outcome.exit_codes == [-9 if rank == victim else 3 for rank in range(3)]
    assert outcome.seconds_after(outcome.ends.struck) < ENOUGH_SECONDS
    why = "the rendezvous of the job is gone" if victim == 0 else f"rank {victim} (process "
    assert [why in log for rank, log in enumerate(outcome.logs) if rank != victim] == [True, True], outcome.log
    jobs.run(tmp_path / "store", "--resume", world=2)  # takes over from the dead without a word
    jobs.assert_equals_whole(tmp_path / "store")


def check_termination(jobs, store, event, world):
    """Check SIGTERM to all ranks just when one of them has come to ``event``."""
    pace = tuple(Plant(rank, "forward", "each", 0.05) for rank in range(world))
    strike = Strike(event=event, number=signal.SIGTERM, met=True)
    outcome = jobs.start(store, world=world, plants=(*pace, Plant(0, "tokenise", "each", 0.05)), strike=strike).wait()
    assert outcome.exit_codes == [143] * world, outcome.log
    assert outcome.seconds_after(outcome.ends.struck) < PREEMPTION_SECONDS
    assert ["go on with --resume" in log for log in outcome.logs] == [True] * world
    assert [path.name for path in store.rglob(".*")] == []
    check_resumes(jobs, store)


@pytest.mark.parametrize(("event", "world"), [("load", 1), ("forward", 3)])
def test_sigterm_ends_all_ranks_within_10_seconds_and_leaves_a_store_to_go_on_with(jobs, tmp_path, event, world):
    check_termination(jobs, tmp_path / "store", event, world)


@pytest.mark.storm
@pytest.mark.parametrize("event", ["tokenise", "load", "shard 3", "call link", "call replace"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_sigterm_at_other_moments_leaves_a_store_to_go_on_with(jobs, tmp_path, event, world):
    check_termination(jobs, tmp_path / "store", event, world)


@pytest.mark.storm
def test_sigterm_ends_ranks_that_cannot_listen_and_the_next_run_sweeps_what_they_left(jobs, tmp_path):
    store, plants = tmp_path / "store", tuple(Plant(rank, "forward", "sleep", 60, nth=2) for rank in range(2))
    outcome = jobs.start(store, world=2, plants=plants, strike=Strike(after=4, number=signal.SIGTERM), gate=True).wait()
    assert outcome.exit_codes == [143, 143], outcome.log
    assert outcome.seconds_after(outcome.ends.struck) < PREEMPTION_SECONDS
    assert [path.name for path in store.rglob(".*")] != []
    check_resumes(jobs, store)


@pytest.mark.storm
@pytest.mark.parametrize("flags", [(), FSDP, PP], ids=str)
def test_sigterm_to_one_rank_ends_all(jobs, tmp_path, flags):
    pace = tuple(Plant(rank, "forward", "each", 0.05) for rank in range(3))
    strike = Strike((1,), event="forward", number=signal.SIGTERM)
    outcome = jobs.start(tmp_path / "store", *flags, world=3, plants=pace, strike=strike).wait()
    assert outcome.exit_codes == [3, 143, 3], outcome.log
    assert outcome.seconds_after(outcome.ends.struck) < ENOUGH_SECONDS
    assert "rank 1: terminated" in outcome.logs[2]
    check_resumes(jobs, tmp_path / "store")


@pytest.mark.storm
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_that_tokenise_end_with_their_rank(jobs, tmp_path, number):
    strike = Strike((0,), event="tokenise", number=number, met=True)
    pace = (Plant(0, "tokenise", "each", 0.5),)
    outcome = jobs.start(tmp_path / "store", "--num-workers", 2, world=2, plants=pace, strike=strike).wait()
    assert outcome.exit_codes == [143 if number == signal.SIGTERM else -9, 3], outcome.log
    assert outcome.ends.left == 0


STALL_SECONDS = 6


@pytest.mark.parametrize(
    ("flags", "stage", "rank"),
    [
        ((), "forward", 1),
        *(
            pytest.param(*case, marks=pytest.mark.storm)
            for case in [
                ((), "commit", 1),
                ((), "encode", 2),
                ((), "tokenise", 0),
                ((), "forward", 0),
                (FSDP, "forward", 1),
                (PP, "forward", 1),
            ]
        ),
    ],
    ids=str,
)
def test_a_rank_that_makes_no_progress_ends_the_job_and_is_named(jobs, tmp_path, flags, stage, rank):
    minutes = ("--timeout-minutes", STALL_SECONDS / 60)
    plants = (Plant(rank, stage, "sleep", 300),)
    gate = stage not in BEFORE_SHARDS
    outcome = jobs.start(tmp_path / "store", *flags, *minutes, world=3, plants=plants, gate=gate).wait()
    assert outcome.exit_codes == [3, 3, 3], outcome.log
    for log in outcome.logs:
        named = re.search(r"ranks? ([\d, ]+) ha(?:s|ve) made no progress for 0.1 minutes", log)
        assert named is not None, outcome.log
        ranks = {int(word) for word in named[1].split(",")}
        # Ranks that share a target wait for the one that sleeps, some of them from a moment later on.
        assert rank in ranks if flags else ranks == {rank}, outcome.log
    assert outcome.seconds_after(outcome.planted) < STALL_SECONDS + ENOUGH_SECONDS
    check_resumes(jobs, tmp_path / "store")


@pytest.mark.storm
def test_a_rank_whose_process_is_stopped_ends_the_job(jobs, tmp_path):
    pace = tuple(Plant(rank, "forward", "each", 0.1) for rank in range(3))
    strike = Strike((1,), event="forward", number=signal.SIGSTOP)
    flags = ("--timeout-minutes", STALL_SECONDS / 60)
    job = jobs.start(tmp_path / "store", *flags, world=3, plants=pace, strike=strike, gate=True, limit=60.0)
    outcome = job.wait()
    assert outcome.exit_codes == [3, -9, 3], outcome.log
    assert ["rank 1 has made no progress" in outcome.logs[rank] for rank in (0, 2)] == [True, True], outcome.log


def costs_of(store):
    """Return the positions that the forwards of each shard of a store run over."""
    cache = open_cache(store)
    rows = [cache.schema.tokens.rows(shard) for shard in range(SHARDS)]
    return [forward_cost([int(cache.lengths[row]) for row in shard], BATCH_SIZE) for shard in rows]


def test_a_slow_rank_holds_up_no_other_and_ends_nothing(jobs, tmp_path):
    plants = (Plant(1, "forward", "sleep", 1.0), *(Plant(rank, "forward", "each", 0.02) for rank in (0, 2)))
    outcome = jobs.run(tmp_path / "store", world=3, plants=plants, gate=True)
    assert sorted(outcome.shards) == list(range(SHARDS))
    assert len(outcome.ranks[1].numbers("shard")) == 1
    assert "captured 2,030 tokens of 6 shards" in outcome.logs[0]
    costs = costs_of(tmp_path / "store")
    for rank in outcome.ranks:
        taken = [costs[shard] for shard in rank.numbers("shard")]
        assert taken == sorted(taken, reverse=True)
    jobs.assert_equals_whole(tmp_path / "store")
