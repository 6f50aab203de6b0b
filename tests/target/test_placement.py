import importlib.util

import pytest
import torch

from dspark_store.target import shaped
from dspark_store.target.placement import require_accelerate

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


def test_weights_that_are_placed_by_accelerate_need_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert shaped._placement(CPU) == {}
    with pytest.raises(ImportError, match=r"onto cuda:1 needs accelerate, not installed: .*dspark-store\[accelerate\]"):
        shaped._placement(CUDA)


def test_where_it_is_installed_they_are_placed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "accelerate")
    require_accelerate("nothing")
    assert shaped._placement(CUDA) == {"device_map": {"": CUDA}}
