import json
import os
import re
import socket
import subprocess
import sys
import threading

import pytest

from dspark_store.format.storage import LocalStorage
from dspark_store.writers import StoreLock
from dspark_store.writers import lock as lock_module
from dspark_store.writers.lock import LOCK_KEY, STALE_SECONDS


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path / "store")


def leave_lock(storage, *, host=None, pid=None, started="1", age=0.0):
    """Put down the lock of another job, whose last heartbeat was ``age`` seconds ago."""
    holder = {"host": host or socket.gethostname(), "pid": os.getpid() if pid is None else pid, "started": started}
    storage.put(LOCK_KEY, json.dumps(holder).encode())
    then = storage.now() - age
    os.utime(storage.path(LOCK_KEY), (then, then))


def ended_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def files(storage):
    return sorted(path.name for path in storage.root.iterdir())


def test_a_lock_names_its_host_and_process(storage):
    with StoreLock(storage):
        holder = json.loads(storage.read(LOCK_KEY))
    assert (holder["host"], holder["pid"]) == (socket.gethostname(), os.getpid())


def test_a_lock_makes_the_folder_of_a_new_store(storage):
    with StoreLock(storage):
        assert files(storage) == [LOCK_KEY]


def test_a_lock_leaves_nothing_behind(storage):
    with StoreLock(storage):
        pass
    assert files(storage) == []


def test_a_second_job_is_refused_by_host_and_process(storage):
    expected = rf"process {os.getpid()} on {re.escape(socket.gethostname())} \(last sign of life \d+ s ago\)"
    with StoreLock(storage), pytest.raises(BlockingIOError, match=expected), StoreLock(storage):
        pass


def test_a_refused_job_leaves_the_lock_alone(storage):
    with StoreLock(storage):
        before = storage.read(LOCK_KEY)
        with pytest.raises(BlockingIOError), StoreLock(storage):
            pass
        assert storage.read(LOCK_KEY) == before
        assert files(storage) == [LOCK_KEY]


def test_a_lock_is_free_again_after_an_error(storage):
    with pytest.raises(KeyError), StoreLock(storage):
        raise KeyError
    with StoreLock(storage):
        pass


def test_the_lock_of_an_ended_process_of_this_host_is_taken_over(storage):
    leave_lock(storage, pid=ended_process())
    with StoreLock(storage):
        assert json.loads(storage.read(LOCK_KEY))["pid"] == os.getpid()


def test_the_lock_of_an_earlier_process_with_the_same_number_is_taken_over(storage):
    leave_lock(storage, pid=os.getpid(), started="1")
    with StoreLock(storage):
        assert json.loads(storage.read(LOCK_KEY))["started"] != "1"


def test_the_lock_of_a_zombie_is_taken_over(storage):
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    started = lock_module._started(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    leave_lock(storage, pid=process.pid, started=started)
    with StoreLock(storage):
        pass
    process.communicate()


def test_a_live_process_of_this_host_keeps_its_lock_however_old_its_heartbeat(storage):
    leave_lock(storage, started=lock_module._started(os.getpid()), age=10 * STALE_SECONDS)
    with pytest.raises(BlockingIOError), StoreLock(storage):
        pass


def test_the_fresh_lock_of_another_host_is_respected(storage):
    leave_lock(storage, host="elsewhere", pid=7, age=STALE_SECONDS - 30)
    with pytest.raises(BlockingIOError, match="process 7 on elsewhere"), StoreLock(storage):
        pass


def test_the_lock_of_another_host_without_a_heartbeat_is_taken_over(storage):
    leave_lock(storage, host="elsewhere", pid=os.getpid(), age=STALE_SECONDS + 30)
    with StoreLock(storage):
        assert json.loads(storage.read(LOCK_KEY))["host"] == socket.gethostname()


def test_a_lock_that_is_not_json_is_taken_over(storage):
    storage.put(LOCK_KEY, b"")
    with StoreLock(storage):
        pass


def test_a_heartbeat_refreshes_the_lock(storage, monkeypatch):
    monkeypatch.setattr(lock_module, "_BEAT_SECONDS", 0.01)
    beaten = threading.Event()
    with StoreLock(storage):
        path = storage.path(LOCK_KEY)
        os.utime(path, (0, 0))
        while path.stat().st_mtime == 0:
            beaten.wait(0.01)
        assert path.stat().st_mtime > storage.now() - 60


def test_a_heartbeat_brings_no_lock_back(storage, monkeypatch):
    monkeypatch.setattr(lock_module, "_BEAT_SECONDS", 0.01)
    with StoreLock(storage):
        storage.delete(LOCK_KEY)
        threading.Event().wait(0.1)
        assert files(storage) == []


def test_the_heartbeat_ends_with_the_lock(storage):
    with StoreLock(storage):
        assert "lock-heartbeat" in [thread.name for thread in threading.enumerate()]
    assert "lock-heartbeat" not in [thread.name for thread in threading.enumerate()]


def test_a_job_that_lost_its_lock_does_not_remove_its_successors(storage):
    with StoreLock(storage):
        leave_lock(storage, host="elsewhere", pid=7)
        theirs = storage.read(LOCK_KEY)
    assert storage.read(LOCK_KEY) == theirs


def test_of_many_that_take_over_an_ended_jobs_lock_one_holds_it(storage):
    leave_lock(storage, pid=ended_process())
    start, done = threading.Barrier(8), threading.Barrier(8)
    held = []

    def take():
        start.wait()
        try:
            with StoreLock(storage):
                held.append(threading.get_ident())
                done.wait(30)
        except BlockingIOError:
            done.wait(30)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 1
