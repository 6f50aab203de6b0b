import errno
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import pytest

from dspark_store.format.storage import LocalStorage
from dspark_store.writers import lock as lock_module
from dspark_store.writers import process as process_module
from dspark_store.writers.lock import LOCK_KEY, STALE_SECONDS, LostLockError, StoreLock, check_lock, read_holder
from dspark_store.writers.process import ProcessName
from tests.processes import ended_pid


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path / "store")


def leave_lock(storage, *, age=0.0, started="1", **process):
    """Put down the lock of another process, whose last heartbeat was ``age`` seconds ago."""
    storage.put(LOCK_KEY, replace(ProcessName.own(), started=started, **process).to_json().encode())
    then = storage.now() - age
    os.utime(storage.path(LOCK_KEY), (then, then))


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
    own = f"process {os.getpid()} on {re.escape(socket.gethostname())}"
    expected = rf"{own} since 20[-0-9: ]+ UTC \(last sign of life \d+ s ago\)"
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
    leave_lock(storage, pid=ended_pid())
    with StoreLock(storage):
        assert json.loads(storage.read(LOCK_KEY))["pid"] == os.getpid()


def test_the_lock_of_an_earlier_process_with_the_same_number_is_taken_over(storage):
    leave_lock(storage, pid=os.getpid(), started="1")
    with StoreLock(storage):
        assert json.loads(storage.read(LOCK_KEY))["started"] != "1"


def test_the_lock_of_a_zombie_is_taken_over(storage):
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    started = process_module._started(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    leave_lock(storage, pid=process.pid, started=started)
    with StoreLock(storage):
        pass
    process.communicate()


def test_a_live_process_of_this_host_keeps_its_lock_however_old_its_heartbeat(storage):
    leave_lock(storage, started=process_module._started(os.getpid()), age=10 * STALE_SECONDS)
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


def beating(monkeypatch, seconds=0.01):
    monkeypatch.setattr(lock_module, "_BEAT_SECONDS", seconds)
    monkeypatch.setattr(lock_module, "LEAVING_SECONDS", seconds)


def test_of_two_containers_with_one_host_name_each_respects_the_others_lock(storage):
    leave_lock(storage, space="pid:[1]", pid=ended_pid())
    with pytest.raises(BlockingIOError), StoreLock(storage):
        pass


OWN = json.loads(ProcessName.own().to_json())
NO_LOCKS = {
    "empty": b"",
    "a bracket": b"{",
    "a number": b"3",
    "half of it": b'{"host": "elsewhere"}',
    "not UTF-8": b"\xff\xfe",
    "brackets": b"[" * 100_000,
    "large": b" " * 4096 + json.dumps(OWN).encode(),
    "infinite": json.dumps({**OWN, "host": "elsewhere"}).replace(str(OWN["pid"]), "1e999").encode(),
    "no number": json.dumps({**OWN, "pid": True}).encode(),
    "below all": json.dumps({**OWN, "pid": -1}).encode(),
    "above all": json.dumps({**OWN, "pid": 10**30}).encode(),
    "no text": json.dumps({**OWN, "host": 1}).encode(),
    "a surrogate": json.dumps({**OWN, "host": "\ud800"}).encode(),
}


@pytest.mark.parametrize("content", NO_LOCKS.values(), ids=NO_LOCKS)
def test_what_is_no_lock_names_nobody_and_is_taken_over(storage, content):
    storage.put(LOCK_KEY, content)
    assert read_holder(storage) is None
    with StoreLock(storage):
        check_lock(storage, storage.read(LOCK_KEY).decode())
    assert files(storage) == []


@pytest.mark.parametrize("kind", ["fifo", "link", "link to a file", "link to a lock"])
def test_what_is_no_file_is_no_lock_and_is_not_followed(storage, tmp_path, kind):
    storage.root.mkdir()
    target = tmp_path / "target"
    if kind == "fifo":
        os.mkfifo(storage.path(LOCK_KEY))
    else:
        storage.path(LOCK_KEY).symlink_to(target)
    if kind.startswith("link to"):
        target.write_text(json.dumps({**OWN, "host": "elsewhere"}) if kind == "link to a lock" else "mine")
    before = target.read_bytes() if target.exists() else None
    assert read_holder(storage) is None
    with StoreLock(storage) as lock:
        lock.check()
    assert files(storage) == []
    assert (target.read_bytes() if target.exists() else None) == before


def test_a_lock_that_became_a_link_is_lost(storage, tmp_path):
    with StoreLock(storage) as lock:
        storage.path(LOCK_KEY).replace(tmp_path / "moved")
        storage.path(LOCK_KEY).symlink_to(tmp_path / "moved")
        with pytest.raises(LostLockError):
            lock.check()
    assert (tmp_path / "moved").exists()


def test_a_folder_in_the_place_of_a_lock_is_told(storage):
    storage.path(LOCK_KEY).mkdir(parents=True)
    assert read_holder(storage) is None
    with pytest.raises(IsADirectoryError, match="is a folder, and no lock: remove it"), StoreLock(storage):
        pass
    assert files(storage) == [LOCK_KEY]


@pytest.mark.parametrize("taken", [10**40, -1, True, "now", 1.5, None])
def test_a_lock_may_say_any_time_that_it_was_taken_at(storage, taken):
    storage.put(LOCK_KEY, json.dumps({**OWN, "taken": taken}).encode())
    holder = read_holder(storage)
    assert holder is not None
    assert holder.taken is None
    with pytest.raises(BlockingIOError, match=r"on \S+ \(last sign of life"), StoreLock(storage):
        pass


FUTURE = -3600.0


def test_a_lock_from_the_future_is_taken_when_no_heartbeat_comes(storage, caplog):
    leave_lock(storage, host="elsewhere", age=FUTURE)
    for watch_seconds, stale in ((0.0, False), (0.01, True)):
        holder = read_holder(storage, watch_seconds=watch_seconds)
        assert holder is not None
        assert holder.stale == stale
    caplog.clear()
    with StoreLock(storage, watch_seconds=0.01) as lock:
        lock.check()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"the lock of {storage.root} is dated in the future: watching for up to")


@pytest.mark.parametrize("step", [0, 5, -3000])
def test_a_lock_from_the_future_is_respected_when_a_heartbeat_comes(storage, step):
    leave_lock(storage, host="elsewhere", age=FUTURE)
    beats = []

    def beat(seconds):
        beats.append(seconds)
        then = storage.now() - FUTURE + step
        os.utime(storage.path(LOCK_KEY), (then, then))

    with pytest.raises(BlockingIOError, match="on elsewhere"), StoreLock(storage, watch_seconds=60, pause=beat):
        pass
    assert len(beats) == 1  # it is watched once, and no longer than until the beat


def test_a_lock_that_another_job_takes_while_it_is_watched_is_respected(storage):
    leave_lock(storage, host="elsewhere", age=FUTURE)

    def take(seconds):
        leave_lock(storage, host="third")

    with pytest.raises(BlockingIOError, match="on third"), StoreLock(storage, watch_seconds=60, pause=take):
        pass


def never(seconds):
    raise AssertionError("there is nothing to wait for")


def test_a_process_of_this_host_is_asked_and_not_watched(storage):
    leave_lock(storage, started=process_module._started(os.getpid()), age=FUTURE)
    with pytest.raises(BlockingIOError), StoreLock(storage, pause=never):
        pass
    leave_lock(storage, pid=ended_pid(), age=FUTURE)
    with StoreLock(storage, pause=never):
        pass


@pytest.mark.parametrize("what", ["its file", "its folder"])
def test_whose_attempt_is_swept_away_is_told_who_writes(storage, monkeypatch, what):
    """Whoever takes the store in that instant removes temporary files, the attempts of others too."""
    link = os.link

    def late(*given, **options):
        monkeypatch.undo()
        storage.sweep()
        if what == "its folder":
            storage.root.rmdir()
        leave_lock(storage, started=process_module._started(os.getpid()))
        link(*given, **options)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(BlockingIOError, match=f"is being written by process {os.getpid()}"), StoreLock(storage):
        pass


def test_a_stale_lock_that_is_swept_while_it_is_removed_is_gone(storage, monkeypatch):
    leave_lock(storage, pid=ended_pid())
    rename = os.rename

    def swept(*given, **options):
        rename(*given, **options)
        storage.sweep()

    monkeypatch.setattr(os, "rename", swept)
    with StoreLock(storage) as lock:
        lock.check()


def test_jobs_that_take_sweep_and_release_only_ever_refuse_each_other_by_name(storage):
    start, held, refused = threading.Barrier(4), [], []

    def work():
        start.wait()
        for _ in range(15):
            try:
                with StoreLock(storage):
                    storage.sweep()
                    held.append(1)
            except BlockingIOError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) + len(refused) == 60
    assert [line for line in refused if "is being written by process" not in line] == []


def test_a_live_lock_is_taken_over_when_told_and_its_holder_hears_of_it_once(storage, monkeypatch):
    beating(monkeypatch)
    heard: list[str] = []
    with StoreLock(storage, on_lost=heard.append) as former, StoreLock(storage, take_over=True) as lock:
        threading.Event().wait(0.1)
        check_lock(storage, lock.holder)
        with pytest.raises(LostLockError, match="was taken over by another job"):
            check_lock(storage, former.holder)
    assert len(heard) == 1
    assert heard[0].startswith(f"{storage.root} was taken over by another job")


def test_a_take_over_waits_for_the_end_of_the_former_process(storage):
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    leave_lock(storage, pid=process.pid, started=process_module._started(process.pid))
    ended = threading.Timer(0.3, process.kill)
    ended.start()
    with StoreLock(storage, take_over=True):
        assert process.wait(0.1) is not None
    process.communicate()


def test_a_take_over_from_another_host_waits_for_a_heartbeat(storage, monkeypatch):
    beating(monkeypatch, 0.1)
    leave_lock(storage, host="elsewhere", pid=7)
    started = time.monotonic()
    with StoreLock(storage, take_over=True):
        assert 0.2 <= time.monotonic() - started < 5


def test_a_dead_jobs_lock_is_taken_without_waiting(storage):
    leave_lock(storage, pid=ended_pid())
    started = time.monotonic()
    with StoreLock(storage, take_over=True):
        assert time.monotonic() - started < 5


def test_an_interrupted_take_over_leaves_no_lock_and_no_heartbeat(storage):
    def interrupt(seconds):
        raise KeyboardInterrupt

    leave_lock(storage, host="elsewhere", pid=7)
    with pytest.raises(KeyboardInterrupt), StoreLock(storage, take_over=True, pause=interrupt):
        pass
    assert files(storage) == []
    assert "lock-heartbeat" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("content", [b"", b"another job's"])
def test_a_lock_that_was_never_taken_is_not_given_back(storage, content):
    storage.put(LOCK_KEY, content)
    StoreLock(storage).release()
    assert storage.read(LOCK_KEY) == content


def test_a_removed_lock_is_lost(storage, monkeypatch):
    beating(monkeypatch)
    heard: list[str] = []
    with StoreLock(storage, on_lost=heard.append):
        storage.delete(LOCK_KEY)
        threading.Event().wait(0.1)
    assert heard == [f"{storage.root} was taken over by another job, or its lock was removed; this one ends"]


def test_a_disk_that_fails_for_a_moment_takes_the_lock_from_nobody(storage, monkeypatch):
    beating(monkeypatch)
    lost: list[str] = []
    failed: list[str] = []
    beats: list[str] = []

    def utime(path, *times, **options):
        if len(failed) < 3:
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        beats.append(path)

    monkeypatch.setattr(os, "utime", utime)
    with StoreLock(storage, on_lost=lost.append):
        deadline = time.monotonic() + 20
        while not beats and time.monotonic() < deadline:
            threading.Event().wait(0.01)
    assert beats
    assert lost == []


def test_a_stale_lock_that_another_job_replaced_in_the_meantime_is_given_back(storage, monkeypatch):
    leave_lock(storage, pid=ended_pid())
    fresh = json.dumps(asdict(replace(ProcessName.own(), host="elsewhere"))).encode()

    def replaced(process):
        monkeypatch.undo()
        storage.put(LOCK_KEY, fresh)
        return False

    monkeypatch.setattr(ProcessName, "still_runs", property(replaced))
    with pytest.raises(BlockingIOError, match="on elsewhere"), StoreLock(storage):
        pass
    assert storage.read(LOCK_KEY) == fresh
    assert files(storage) == [LOCK_KEY]


def test_of_many_that_take_over_an_ended_jobs_lock_one_holds_it(storage):
    leave_lock(storage, pid=ended_pid())
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


def test_who_holds_a_store_can_be_asked_without_touching_it(tmp_path):
    storage = LocalStorage(tmp_path)
    assert read_holder(storage) is None
    elsewhere = json.dumps({"host": "elsewhere", "space": "?", "pid": 7, "started": "1", "taken": 5 * 10**9})
    (tmp_path / LOCK_KEY).write_text(elsewhere)
    for age, stale in ((10, False), (1000, True)):
        os.utime(tmp_path / LOCK_KEY, (time.time() - age,) * 2)
        holder = read_holder(storage)
        assert holder is not None
        assert (holder.host, holder.pid, holder.taken, holder.stale) == ("elsewhere", 7, 5.0, stale)
        assert holder.age_seconds == pytest.approx(age, abs=5)
    (tmp_path / LOCK_KEY).write_text("no lock")
    assert read_holder(storage) is None
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_KEY]
