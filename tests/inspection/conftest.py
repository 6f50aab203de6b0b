"""What tests of several modules share: a cluster, a disk that nobody waits for, a place for a copy."""

import os

import pytest
from distributed import LocalCluster


@pytest.fixture(scope="module")
def cluster():
    """Two workers of dask, each a process."""
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:
        yield cluster


@pytest.fixture
def unsynced(monkeypatch):
    """Wait for no disk: no test cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def place(tmp_path):
    """Where a copy is to be: two folders that are not there yet."""
    return tmp_path / "new" / "copy"
