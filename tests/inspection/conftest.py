"""What tests of copies and repairs share."""

import os

import pytest


@pytest.fixture
def unsynced(monkeypatch):
    """Wait for no disk: no test cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def place(tmp_path):
    """Where a copy is to be: two folders that are not there yet."""
    return tmp_path / "new" / "copy"
