"""One tiny target and one file of chats for all tests of the command. No test here pulls the plug, so nothing syncs."""

import os

import pytest

from tests.precompute.jobs import arguments, interrupted, precompute, sharded_module
from tests.precompute.rank_jobs import RankJobs
from tests.tiny import save_target_dir, write_chats


@pytest.fixture(autouse=True)
def unsynced(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    return save_target_dir(tmp_path_factory.mktemp("targets") / "llama")


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    return write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl", 11)


@pytest.fixture
def unfinished(llama, chats, tmp_path):
    """A store whose shards are all there, and which is not declared complete."""
    return interrupted(arguments(llama, chats, tmp_path / "unfinished"))


@pytest.fixture(scope="session")
def store(llama, chats, tmp_path_factory):
    """The finished store of that target and those chats; no test changes it."""
    return precompute(llama, chats, tmp_path_factory.mktemp("stores") / "store")


@pytest.fixture
def job(llama, chats, tmp_path):
    """Make the flags of a job whose store goes two new folders deep, with changes that are given as flags."""

    def make(*flags, target=llama, data=chats, output=tmp_path / "out" / "store"):
        return arguments(target, data, output, *flags)

    return make


@pytest.fixture
def no_target(monkeypatch):
    def load(*args, **options):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(sharded_module, "load_target", load)


@pytest.fixture(scope="session")
def jobs(tmp_path_factory):
    """Jobs of several ranks, beside the stores that one process makes of them."""
    return RankJobs(tmp_path_factory.mktemp("jobs"))
