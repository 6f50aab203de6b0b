"""What all ranks have captured is added up, and shown on rank 0."""

import time
from dataclasses import replace

import pytest

from dspark_store.precompute.counts import CaptureCounts
from dspark_store.precompute.keyvalue import LocalKeys
from dspark_store.precompute.watch import Watch
from dspark_store.precompute.world import World
from tests.writers.small_store import LENGTHS, small_record

SHARDS = (1, 2)  # rows 4 to 9: 45 of 81 tokens


@pytest.fixture
def count():
    """Make the counts of two ranks, of which rank 0 shows."""
    keys = LocalKeys()
    record = small_record()
    record = replace(record, schema=record.schema.settled(len(LENGTHS)))
    with Watch(0, 1, None) as watch:
        worlds = [World(rank, 2, rank, keys, watch) for rank in range(2)]
        yield lambda: [CaptureCounts(world, record, SHARDS, LENGTHS if world.leads else ()) for world in worlds]


def test_a_report_is_of_all_ranks(count):
    leader, follower = count()
    with leader, follower:
        leader.batch(25)
        follower.batch(20)
        leader.committed(10, 1000)
        follower.committed(5, 500)
    report = leader.report(9.0)
    assert (report.shards, report.tokens, report.stored_bytes, report.tokens_per_second) == (2, 45, 1500, 5.0)


def test_a_bar_goes_on_from_what_was_done_before(count, capsys):
    leader, follower = count()
    with leader:
        follower.batch(45)
        leader.pause()
    shown = capsys.readouterr().err
    assert "44%" in shown
    assert "81.0/81.0" in shown


def test_a_shard_that_was_captured_twice_does_not_overfill_the_bar(count, capsys):
    leader, follower = count()
    with leader:
        follower.batch(45)
        leader.batch(30)
    assert "81.0/81.0" in capsys.readouterr().err
    assert leader.report(1.0).tokens == 45


def test_only_rank_0_shows_anything(count, capsys):
    leader, follower = count()
    with leader:
        capsys.readouterr()
        with follower:
            follower.batch(10)
            follower.pause()
        assert capsys.readouterr().err == ""


def test_a_note_tells_the_size_to_come(count, monkeypatch):
    leader, _ = count()
    with leader:
        leader.batch(24)  # not committed yet: nobody knows what they take
        assert leader._note().endswith("expected in all")
        leader.committed(24, 24_000)
        leader.batch(10)
        monkeypatch.setattr(time, "monotonic", lambda: leader._started + 2.0)
        assert leader._note() == "12.00 KB/s written, about 45.00 KB in all"


def test_a_job_that_took_no_time_has_no_rate(count):
    leader, _ = count()
    with leader:
        pass
    assert leader.report(0.0).tokens_per_second == 0
