"""Every `KeyValue` keeps the same contract: that of a lone process, a part of another one, and torch's store."""

import datetime as dt
import threading

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # in C, not in __all__

from dspark_store.precompute.keyvalue import LocalKeys, ScopedKeys, SharedStore

TIMEOUT = dt.timedelta(seconds=20)


@pytest.fixture(scope="module")
def stores():
    """Keep torch's store in this process, on a free port, with a second connection to it."""
    kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    return kept, TCPStore("127.0.0.1", kept.port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)


@pytest.fixture
def connect(stores, request):
    """Give the store over one of its connections, in a part for one test."""

    def make(prefix=request.node.name, connection=0):
        return SharedStore(stores[connection], prefix)

    return make


@pytest.fixture(params=["local", "scoped", "shared", "scoped shared"])
def keys(request, connect):
    keys = connect() if "shared" in request.param else LocalKeys()
    return ScopedKeys(keys, "part") if "scoped" in request.param else keys


def test_what_was_put_is_got(keys):
    keys.set("a/b", "one")
    keys.set("a/b", "zwölf ✓")
    assert keys.get("a/b") == "zwölf ✓"


def test_getting_what_is_not_there_does_not_wait(keys):
    assert keys.get("nothing") is None


def test_an_empty_text_is_there(keys):
    keys.set("a", "")
    assert keys.get("a") == ""


def test_long_texts_come_whole(keys):
    keys.set("a", "0123456789" * 50_000)
    assert keys.get("a") == "0123456789" * 50_000


def test_a_counter_starts_at_nothing_and_adds_up(keys):
    assert [keys.add("n", count) for count in (0, 2, 3, 0)] == [0, 2, 5, 5]


def test_a_swap_into_nothing_is_done_once(keys):
    assert keys.swap("a", "", "first")
    assert not keys.swap("a", "", "second")
    assert keys.get("a") == "first"


def test_a_swap_needs_what_it_expects(keys):
    keys.set("a", "old")
    assert not keys.swap("a", "other", "new")
    assert keys.get("a") == "old"
    assert keys.swap("a", "old", "new")
    assert keys.get("a") == "new"


def test_a_swap_that_expects_a_text_makes_no_key(keys):
    assert not keys.swap("a", "old", "new")
    assert keys.get("a") is None


@pytest.mark.parametrize("kind", ["local", "shared"])
def test_two_scopes_of_one_store_are_apart(kind, connect):
    keys = LocalKeys() if kind == "local" else connect()
    one, other = ScopedKeys(keys, "one"), ScopedKeys(keys, "other")
    one.set("a", "x")
    one.add("n", 1)
    assert one.swap("s", "", "x")
    assert (other.get("a"), other.add("n", 0), other.swap("s", "", "y")) == (None, 0, True)


def test_two_prefixes_of_one_store_are_apart(connect):
    one, other = connect("one"), connect("other")
    one.set("a", "x")
    assert other.get("a") is None


def test_of_many_swaps_into_one_key_one_is_done(connect):
    done: list[str] = []

    def swap(keys, number):
        start.wait()
        if keys.swap("a", "", f"worker {number}"):
            done.append(f"worker {number}")

    start = threading.Barrier(6)
    threads = [threading.Thread(target=swap, args=(connect(connection=number % 2), number)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [connect().get("a")]


def test_a_connection_serves_two_threads(connect):
    keys = connect()
    threads = [threading.Thread(target=lambda: [keys.add("n", 1) for _ in range(200)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert keys.add("n", 0) == 400


def test_groups_are_made_in_a_part_of_their_own(connect):
    keys = connect()
    keys.torch_store.set("a", "x")
    assert keys.get("a") is None
    assert keys.get("group/a") == "x"


def test_ranks_that_torchrun_starts_again_share_a_store_and_none_of_the_old_keys(stores, monkeypatch):
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(stores[0].port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**settings, "TORCHELASTIC_RESTART_COUNT": "0"}.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        leader, follower = SharedStore.connect(0, 2), SharedStore.connect(1, 2)
        assert (leader.get("failure"), follower.add("next", 0)) == (None, 0)
        leader.set("failure", "x")
        leader.add("next", 3)
        assert (follower.again().get("failure"), follower.add("next", 0)) == ("x", 3)
