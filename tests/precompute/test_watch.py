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

from dspark_store.precompute import watch as watch_module
from dspark_store.precompute.keyvalue import LocalKeys
from dspark_store.precompute.watch import FAILED, TERMINATED, StoppedError, Watch
from dspark_store.writers.lock import LEAVING_SECONDS
from dspark_store.writers.process import ProcessName
from tests.precompute import watched

LIMIT = 60


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
def quick(monkeypatch):
    """A watch that looks often, and loses patience soon."""
    monkeypatch.setattr(watch_module, "_PERIOD", 0.01)
    monkeypatch.setattr(watch_module, "_SILENT_SECONDS", 0.8)


@pytest.fixture
def elsewhere():
    """A process of another host."""
    return replace(ProcessName.own(), host="elsewhere", pid=7)


def until(ready, limit=LIMIT):
    deadline = time.monotonic() + limit
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.005)


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
    assert watched.PREEMPTION - 0.1 < seconds < watched.PREEMPTION + 5
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


def test_two_ranks_of_one_host_watch_each_other(start, port, tmp_path, quick):
    with Watch(0, 2, watched.shared_store(port, keep=True)) as watch:
        process = start(watched.hang, port)
        watch.pause(0.2)
        process.kill()
        assert (
            ends_with(watch, rf"rank 1 \(process {process.pid} on {socket.gethostname()}\) is gone").exit_code == FAILED
        )


def test_a_failure_ends_another_rank_that_is_blocked_in_c(start, port, tmp_path, quick):
    with Watch(0, 2, watched.shared_store(port, keep=True)) as watch:
        process = start(watched.hang, port)
        assert watch.fail("the chats are not JSON") == ""
        code, seconds = ended(process)
        assert code == FAILED
        assert seconds < watched.FAILURE + 5
        assert (tmp_path / "stderr").read_text() == "stopped: rank 1: rank 0: the chats are not JSON\n"
        watch.let_others_hear()


def test_an_error_that_leaves_the_block_of_a_rank_ends_its_process_even_if_the_rest_hangs(start, port, tmp_path, quick):
    with Watch(0, 2, watched.shared_store(port, keep=True)):
        process = start(watched.fail_and_hang, port)
        code, seconds = ended(process)
        assert code == FAILED
        assert seconds < watched.FAILURE + 5
        assert (tmp_path / "stderr").read_text() == "error: rank 1: the disk is gone\n"


def test_an_interrupt_that_leaves_the_block_of_a_rank_is_told_as_one(start, port, tmp_path, quick):
    with Watch(0, 2, watched.shared_store(port, keep=True)):
        process = start(watched.interrupt_and_hang, port)
        assert ended(process)[0] == FAILED
        assert (tmp_path / "stderr").read_text() == "stopped: rank 1: interrupted\n"


def test_a_job_that_was_pushed_aside_can_end_on_all_ranks_before_another_one_begins():
    until_it_ends = watch_module._FAILURE_SECONDS + watch_module._PERIOD + watch_module._LAST_ACTS_SECONDS
    until_others_hear = watch_module._PERIOD
    assert until_it_ends + until_others_hear + until_it_ends < LEAVING_SECONDS


def test_a_failure_elsewhere_is_told_with_its_rank(quick):
    keys = LocalKeys()
    with Watch(1, 3, keys) as watch:
        watch.check()
        keys.swap("failure", "", json.dumps({"rank": 2, "message": "no space is left"}))
        assert ends_with(watch, "^rank 2: no space is left$").exit_code == FAILED
        until(lambda: keys.get("heard/1"))


def test_the_first_failure_counts(quick):
    keys = LocalKeys()
    one, other = Watch(0, 2, keys), Watch(1, 2, keys)
    assert one.fail("first") == ""
    assert other.fail("second") == "rank 0: first"


def test_a_rank_is_not_stopped_by_its_own_failure(quick):
    with Watch(0, 2, LocalKeys()) as watch:
        watch.fail("mine")
        watch.pause(0.1)


def test_rank_0_waits_until_all_others_have_heard(monkeypatch, elsewhere):
    keys = LocalKeys()
    watch = Watch(0, 2, keys)
    keys.set("peer/1", elsewhere.to_json())
    heard = threading.Timer(0.2, lambda: keys.set("heard/1", "1"))
    heard.start()
    watch.let_others_hear()
    assert keys.get("heard/1") == "1"
    monkeypatch.setattr(watch_module, "_HEARING_SECONDS", 0.1)
    deaf = Watch(0, 3, keys)
    deaf.let_others_hear()


@pytest.mark.parametrize(("rank", "peer"), [(0, 1), (0, 2), (1, 0)])
def test_silence_elsewhere_is_noticed_by_rank_0_and_that_of_rank_0_by_all(quick, elsewhere, rank, peer):
    keys = LocalKeys()
    keys.set(f"peer/{peer}", elsewhere.to_json())
    with Watch(rank, 3, keys) as watch:
        ends_with(watch, rf"rank {peer} \(process 7 on elsewhere\) is gone")
        assert json.loads(keys.get("failure") or "")["rank"] == rank


def test_two_ranks_that_are_not_0_do_not_listen_to_each_other(quick, elsewhere):
    keys = LocalKeys()
    keys.set("peer/2", elsewhere.to_json())
    with Watch(1, 3, keys) as watch:
        watch.pause(1.1)


def test_a_rank_elsewhere_that_gives_signs_of_life_lives(quick, elsewhere):
    keys = LocalKeys()
    keys.set("peer/1", elsewhere.to_json())
    with Watch(0, 2, keys) as watch:
        for beat in range(22):
            keys.set("beat/1", str(beat))
            watch.pause(0.05)


def test_a_rank_that_comes_late_is_not_taken_for_silent(quick, elsewhere):
    keys = LocalKeys()
    with Watch(0, 2, keys) as watch:
        watch.pause(1.0)
        keys.set("peer/1", elsewhere.to_json())
        watch.pause(0.2)


def test_a_rank_that_left_well_is_not_taken_for_dead(quick, elsewhere):
    keys = LocalKeys()
    for rank, process in enumerate([replace(ProcessName.own(), started="1"), elsewhere], 1):
        keys.set(f"left/{rank}", "1")
        keys.set(f"peer/{rank}", process.to_json())
    with Watch(0, 3, keys) as watch:
        watch.pause(1.1)


def test_a_watch_leaves_well(quick):
    keys = LocalKeys()
    with Watch(1, 2, keys):
        pass
    assert keys.get("left/1") == "1"


class Broken(LocalKeys):
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


def test_the_end_of_the_rendezvous_is_a_reason_to_stop(quick):
    keys = Broken()
    with Watch(1, 2, keys) as watch:
        keys.gone = True
        ends_with(watch, "the rendezvous of the job is gone")
        assert "rendezvous" in watch.fail("something else")


def test_a_rendezvous_that_does_not_answer_is_a_reason_to_stop(quick):
    keys = Broken()
    with Watch(1, 2, keys) as watch:
        keys.answers.clear()
        ends_with(watch, "the rendezvous of the job has not answered for 1 s")
        keys.answers.set()


def test_a_rendezvous_that_does_not_answer_holds_up_no_sigterm(monkeypatch):
    monkeypatch.setattr(watch_module, "_PERIOD", 0.01)
    keys = Broken()
    with Watch(1, 2, keys) as watch:
        keys.answers.clear()
        os.kill(os.getpid(), signal.SIGTERM)
        assert ends_with(watch, "terminated").exit_code == TERMINATED
        keys.answers.set()


def test_torchruns_sigterm_after_a_failure_is_told_as_the_failure(monkeypatch):
    keys = LocalKeys()
    with Watch(1, 2, keys) as watch:
        keys.swap("failure", "", json.dumps({"rank": 0, "message": "no space is left"}))
        os.kill(os.getpid(), signal.SIGTERM)
        assert ends_with(watch, "rank 0: no space is left").exit_code == FAILED


def test_sigterm_is_a_reason_to_stop_and_other_signals_are_not(monkeypatch):
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


def test_a_watch_leaves_no_thread_no_descriptor_and_no_handler(quick):
    def handler(number, frame):
        pass

    old = signal.signal(signal.SIGTERM, handler)
    one, other = socket.socketpair()
    one.setblocking(False)
    old_wakeup = signal.set_wakeup_fd(one.fileno())
    try:
        before = leftovers()
        for keys in (None, LocalKeys()):
            with Watch(0, 2 if keys else 1, keys):
                assert signal.getsignal(signal.SIGTERM) is not handler
        assert leftovers() == before
        assert signal.getsignal(signal.SIGTERM) is handler
        assert signal.set_wakeup_fd(-1) == one.fileno()
    finally:
        signal.signal(signal.SIGTERM, old)
        signal.set_wakeup_fd(old_wakeup)
        one.close()
        other.close()


def test_an_error_of_a_rank_alone_leaves_nothing_either():
    before, handler = leftovers(), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyError), Watch(0, 1, None):
        raise KeyError
    assert leftovers() == before
    assert signal.getsignal(signal.SIGTERM) is handler


def test_off_the_main_thread_a_watch_works_and_leaves_signals_alone(quick):
    handlers, reasons, keys = [], [], LocalKeys()

    def run():
        with Watch(1, 2, keys) as watch:
            handlers.append(signal.getsignal(signal.SIGTERM))
            keys.swap("failure", "", json.dumps({"rank": 0, "message": "no"}))
            reasons.append(str(ends_with(watch, "rank 0: no")))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LIMIT)
    assert handlers == [signal.getsignal(signal.SIGTERM)]
    assert reasons == ["rank 0: no"]
