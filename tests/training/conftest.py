"""One tiny target, its chats and their store, for all tests of training."""

import os

import pytest
import torch

from tests.precompute.jobs import precompute
from tests.tiny import save_target_dir, tiny_llama, write_chats


@pytest.fixture(autouse=True)
def unsynced(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Bits depend on how many threads share a sum, and threads of several test workers wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """A target whose head is loud, so that its distributions are far from even."""
    model = tiny_llama()
    model.lm_head.weight.data *= 60
    return save_target_dir(tmp_path_factory.mktemp("targets") / "llama", model)


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    return write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl", 11)


@pytest.fixture(scope="session")
def store(llama, chats, tmp_path_factory):
    """The finished fp32 store of that target and those chats; no test changes it."""
    return precompute(llama, chats, tmp_path_factory.mktemp("stores") / "store")
