"""A rank ends for a failure elsewhere, a rank that is gone and a signal, whatever its main thread is at."""

import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dspark_store.precompute.peers import PATIENCE, Patience, Peers
from dspark_store.precompute.rendezvous import Keys
from dspark_store.precompute.watch import FAILED, TERMINATED, StoppedError, Watch
from dspark_store.writers.lock import LEAVING_SECONDS
from dspark_store.writers.process import ProcessName
from tests.precompute import watched
from tests.processes import until

LIMIT = 60
QUICK = Patience(period=0.01, silent=0.8)
"""That of a watch which looks often, and soon takes silence for an end."""


@pytest.fixture(scope="module")
def forkserver():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.precompute.watched"])
    return context


@pytest.fixture
def start(forkserver, tmp_path):
    """Start a process that acts under a watch, and wait until it is ready."""
    started = []

    def go(act, port=None):
        process = forkserver.Process(target=watched.run_rank, args=(act, tmp_path, port))
        process.start()
        started.append(process)
        until((tmp_path / "ready").exists)
        return process

    yield go
    for process in started:
        process.kill()
        process.join()


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def keys():
    return Keys()


@pytest.fixture
def elsewhere():
    """A process of another host."""
    return replace(ProcessName.own(), host="elsewhere", pid=7)


def ends_with(watch, message):
    """Wait, inside the block, until the watch gives a reason to stop."""
    with pytest.raises(StoppedError, match=message) as caught:
        until(lambda: watch.pause(0.005))
    return caught.value


def ended(process):
    """Return the exit code of a process, and how long it took to end."""
    started = time.monotonic()
    process.join(LIMIT)
    return process.exitcode, time.monotonic() - started


def leftovers():
    """Count this process's threads and open descriptors."""
    return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


def test_sigterm_ends_a_process_that_is_blocked_in_c_and_does_what_is_left_to_do(start, tmp_path):
    process = start(watched.hang)
    process.terminate()
    code, seconds = ended(process)
    assert code == TERMINATED == 143
    assert watched.SHORT.preemption - 0.1 < seconds < watched.SHORT.preemption + 5
    assert (tmp_path / "act").exists()
    assert (tmp_path / "stderr").read_text().startswith("stopped: terminated: what is committed stays")


def test_last_acts_that_fail_or_hang_keep_no_process_alive(start, tmp_path):
    process = start(watched.hang_with_bad_acts)
    process.terminate()
    assert ended(process)[0] == TERMINATED
    assert (tmp_path / "act").exists()


def test_a_process_that_asks_ends_in_good_order_at_sigterm(start, tmp_path):
    process = start(watched.cooperate)
    process.terminate()
    assert ended(process)[0] == TERMINATED
    assert (tmp_path / "stopped").read_text() == "terminated: what is committed stays; go on with --resume"


def test_two_ranks_of_one_host_watch_each_other(start, port, tmp_path):
    with Watch(0, 2, watched.shared_keys(port, keep=True), QUICK) as watch:
        process = start(watched.hang, port)
        watch.pause(0.2)
        process.kill()
        assert (
            ends_with(watch, rf"rank 1 \(process {process.pid} on {socket.gethostname()}\) is gone").exit_code == FAILED
        )


def test_a_failure_ends_another_rank_that_is_blocked_in_c(start, port, tmp_path):
    with Watch(0, 2, watched.shared_keys(port, keep=True), QUICK) as watch:
        process = start(watched.hang, port)
        assert watch.fail("the chats are not JSON") == ""
        code, seconds = ended(process)
        assert code == FAILED
        assert seconds < watched.SHORT.failure + 5
        assert (tmp_path / "stderr").read_text() == "stopped: rank 1: rank 0: the chats are not JSON\n"
        watch.let_others_hear()


@pytest.mark.parametrize(
    ("act", "line"),
    [
        (watched.fail_and_hang, "error: rank 1: the disk is gone"),
        (watched.interrupt_and_hang, "stopped: rank 1: interrupted"),
    ],
)
def test_an_error_that_leaves_the_block_of_a_rank_ends_its_process_even_if_the_rest_hangs(
    start, port, tmp_path, act, line
):
    with Watch(0, 2, watched.shared_keys(port, keep=True), QUICK):
        code, seconds = ended(start(act, port))
        assert code == FAILED
        assert seconds < watched.SHORT.failure + 5
        assert (tmp_path / "stderr").read_text() == f"{line}\n"


def test_a_job_ends_on_all_ranks_before_one_that_pushes_it_aside_begins_and_within_5_seconds_of_a_ranks_end():
    patience = Patience()
    until_it_ends = patience.failure + patience.period + patience.last_acts
    assert until_it_ends + patience.period + until_it_ends < LEAVING_SECONDS
    assert until_it_ends + patience.period <= 5


def test_a_failure_elsewhere_is_told_with_its_rank(keys):
    with Watch(1, 3, keys, QUICK) as watch:
        watch.check()
        keys.setdefault("failure", json.dumps({"rank": 2, "message": "no space is left"}))
        assert ends_with(watch, "^rank 2: no space is left$").exit_code == FAILED
        until(lambda: keys.get("heard/1"))


STALL = Patience(period=0.01, silent=0.3, stall=0.3)


@pytest.mark.parametrize(("rank", "peer"), [(0, 1), (1, 0)])
def test_a_rank_that_shows_no_progress_is_named_by_rank_0_and_rank_0_by_all(rank, peer, keys):
    keys.set(f"progress/{peer}", "7 None")
    with Watch(rank, 3, keys, STALL) as watch:
        ends_with(watch, f"^rank {peer} has made no progress for 0.005 minutes: .* --timeout-minutes")
        assert json.loads(keys.get("failure") or "")["rank"] == rank


def test_ranks_that_stand_still_together_are_all_named(keys):
    for peer in (1, 3):
        keys.set(f"progress/{peer}", "7 None")
    with Watch(0, 4, keys, STALL) as watch:
        ends_with(watch, "^ranks 1, 3 have made no progress")


def test_rank_0_is_told_that_it_makes_no_progress_itself(keys):
    with Watch(0, 2, keys, STALL) as watch, watch.working():
        until(lambda: keys.get("failure"))
        assert json.loads(keys.get("failure") or "")["message"].startswith("rank 0 has made no progress")


def test_work_shows_its_steps_and_signs_and_whatever_is_no_work_shows_that_its_process_lives():
    keys, sign = Keys(), ["first"]

    def shown():
        return keys.get("progress/1") or ""

    with Watch(1, 2, keys, QUICK) as watch:
        until(lambda: shown().startswith("beat"))
        before = shown()
        until(lambda: shown() != before)
        with watch.working(lambda: sign[0]):
            until(lambda: shown() == "0 first")
            sign[0] = "second"
            until(lambda: shown() == "0 second")
            watch.progress()
            until(lambda: shown() == "1 second")
            watch.pause(0)
            until(lambda: shown() == "2 second")
        until(lambda: shown().startswith("beat"))


def test_a_rank_that_has_not_come_or_has_left_well_does_not_stand_still(keys):
    keys.set("left/1", "1")
    keys.set("progress/1", "7 None")
    with Watch(0, 3, keys, STALL) as watch:
        watch.pause(0.6)


def test_the_first_failure_counts(keys):
    one, other = Watch(0, 2, keys, QUICK), Watch(1, 2, keys, QUICK)
    assert one.fail("first") == ""
    assert other.fail("second") == "rank 0: first"


def test_a_rank_is_not_stopped_by_its_own_failure():
    with Watch(0, 2, Keys(), QUICK) as watch:
        watch.fail("mine")
        watch.pause(0.1)


def test_rank_0_waits_until_all_others_have_heard(elsewhere, keys):
    watch = Watch(0, 2, keys)
    keys.set("peer/1", elsewhere.to_json())
    heard = threading.Timer(0.2, lambda: keys.set("heard/1", "1"))
    heard.start()
    watch.let_others_hear()
    assert keys.get("heard/1") == "1"
    Watch(0, 3, keys, Patience(hearing=0.1)).let_others_hear()


@pytest.mark.parametrize(("rank", "peer"), [(0, 1), (0, 2), (1, 0)])
def test_silence_elsewhere_is_noticed_by_rank_0_and_that_of_rank_0_by_all(elsewhere, rank, peer, keys):
    keys.set(f"peer/{peer}", elsewhere.to_json())
    with Watch(rank, 3, keys, QUICK) as watch:
        ends_with(watch, rf"rank {peer} \(process 7 on elsewhere\) is gone")
        assert json.loads(keys.get("failure") or "")["rank"] == rank


def test_two_ranks_that_are_not_0_do_not_listen_to_each_other(elsewhere, keys):
    keys.set("peer/2", elsewhere.to_json())
    with Watch(1, 3, keys, QUICK) as watch:
        watch.pause(1.1)


def test_a_rank_elsewhere_that_gives_signs_of_life_lives(elsewhere, keys):
    keys.set("peer/1", elsewhere.to_json())
    with Watch(0, 2, keys, QUICK) as watch:
        for beat in range(22):
            keys.set("beat/1", str(beat))
            watch.pause(0.05)


def test_a_rank_that_comes_late_is_not_taken_for_silent(elsewhere, keys):
    with Watch(0, 2, keys, QUICK) as watch:
        watch.pause(1.0)
        keys.set("peer/1", elsewhere.to_json())
        watch.pause(0.2)


def test_a_rank_that_left_well_is_not_taken_for_dead(elsewhere, keys):
    for rank, process in enumerate([replace(ProcessName.own(), started="1"), elsewhere], 1):
        keys.set(f"left/{rank}", "1")
        keys.set(f"peer/{rank}", process.to_json())
    with Watch(0, 3, keys, QUICK) as watch:
        watch.pause(1.1)


class Broken(Keys):
    """Keys whose store goes away, or never answers again."""

    def __init__(self):
        super().__init__()
        self.gone, self.answers = False, threading.Event()
        self.answers.set()

    def set(self, key, value):
        if self.gone:
            raise RuntimeError("recvValue failed")
        self.answers.wait(LIMIT)
        super().set(key, value)


def test_the_end_of_the_rendezvous_is_a_reason_to_stop():
    keys = Broken()
    with Watch(1, 2, keys, QUICK) as watch:
        keys.gone = True
        ends_with(watch, "the rendezvous of the job is gone")
        assert "rendezvous" in watch.fail("something else")


def test_a_rendezvous_that_does_not_answer_is_a_reason_to_stop():
    keys = Broken()
    with Watch(1, 2, keys, QUICK) as watch:
        keys.answers.clear()
        ends_with(watch, "the rendezvous of the job has not answered for 1 s")
        keys.answers.set()


def test_a_rendezvous_that_does_not_answer_holds_up_no_sigterm():
    keys = Broken()
    with Watch(1, 2, keys, Patience(period=0.01)) as watch:
        keys.answers.clear()
        os.kill(os.getpid(), signal.SIGTERM)
        assert ends_with(watch, "terminated").exit_code == TERMINATED
        keys.answers.set()


def test_torchruns_sigterm_after_a_failure_is_told_as_the_failure(keys):
    with Watch(1, 2, keys) as watch:
        keys.setdefault("failure", json.dumps({"rank": 0, "message": "no space is left"}))
        os.kill(os.getpid(), signal.SIGTERM)
        assert ends_with(watch, "rank 0: no space is left").exit_code == FAILED


def test_of_ranks_that_are_told_to_end_together_none_takes_another_for_failed(keys):
    with Watch(1, 2, keys) as watch:
        message = "terminated: what is committed stays; go on with --resume"
        keys.setdefault("failure", json.dumps({"rank": 0, "message": message}))
        os.kill(os.getpid(), signal.SIGTERM)
        assert ends_with(watch, "^terminated").exit_code == TERMINATED


def test_sigterm_is_a_reason_to_stop_and_other_signals_are_not():
    old = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        with Watch(0, 1, None) as watch:
            os.kill(os.getpid(), signal.SIGUSR1)
            watch.pause(0.05)
            os.kill(os.getpid(), signal.SIGTERM)
            assert ends_with(watch, "terminated").exit_code == TERMINATED
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_the_first_reason_counts():
    with Watch(0, 1, None) as watch:
        watch.stop("first", 3, grace=60)
        watch.stop("second")
        assert ends_with(watch, "first").exit_code == 3


def test_a_watch_leaves_well_and_no_thread_no_descriptor_and_no_handler(keys):
    def handler(number, frame):
        pass

    old = signal.signal(signal.SIGTERM, handler)
    one, other = socket.socketpair()
    one.setblocking(False)
    old_wakeup = signal.set_wakeup_fd(one.fileno())
    try:
        before = leftovers()
        for size, shared in ((1, None), (2, keys)):
            with Watch(0, size, shared, QUICK):
                assert signal.getsignal(signal.SIGTERM) is not handler
        assert keys.get("left/0") == "1"
        with pytest.raises(KeyError), Watch(0, 1, None):
            raise KeyError
        assert leftovers() == before
        assert signal.getsignal(signal.SIGTERM) is handler
        assert signal.set_wakeup_fd(-1) == one.fileno()
    finally:
        signal.signal(signal.SIGTERM, old)
        signal.set_wakeup_fd(old_wakeup)
        one.close()
        other.close()


def test_off_the_main_thread_a_watch_works_and_leaves_signals_alone():
    handlers, reasons, keys = [], [], Keys()

    def run():
        with Watch(1, 2, keys, QUICK) as watch:
            handlers.append(signal.getsignal(signal.SIGTERM))
            keys.setdefault("failure", json.dumps({"rank": 0, "message": "no"}))
            reasons.append(str(ends_with(watch, "rank 0: no")))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LIMIT)
    assert handlers == [signal.getsignal(signal.SIGTERM)]
    assert reasons == ["rank 0: no"]


def test_a_rank_that_stops_right_after_it_joined_is_named(port):
    keys = watched.shared_keys(port, keep=True)
    judge = Peers(0, 2, keys, Patience(period=0.0, stall=0.0))
    judge.join()
    Peers(1, 2, keys, PATIENCE).join()
    assert "ranks 0, 1 have made no progress" in judge.look()
