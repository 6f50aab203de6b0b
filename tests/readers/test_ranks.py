"""A loader's rank is given, or found."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from dspark_store.readers.loader import resolve_ranks


@pytest.fixture
def group(tmp_path) -> Iterator[None]:
    """A default process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def last_of_six() -> Iterator[None]:
    """A default process group of six, of which this process is the last; the others are made up."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=6)
    yield
    dist.destroy_process_group()


def test_a_given_rank_is_taken() -> None:
    assert resolve_ranks(2, 3, None) == (2, 3)


def test_without_a_process_group_there_is_one_rank() -> None:
    assert resolve_ranks(None, None, None) == (0, 1)


def test_the_default_process_group_gives_the_rank(last_of_six: None) -> None:
    assert resolve_ranks(None, None, None) == (5, 6)


def test_a_device_mesh_gives_the_rank(last_of_six: None) -> None:
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    assert resolve_ranks(None, None, mesh["dp"]) == (2, 3)
    with pytest.raises(ValueError, match=r"dimensions \('dp', 'tp'\): give the data-parallel one, mesh\['dp'\]"):
        resolve_ranks(None, None, mesh)


def test_a_given_rank_goes_before_the_process_groups(group: None) -> None:
    assert resolve_ranks(1, 4, None) == (1, 4)


@pytest.mark.parametrize(("rank", "size"), [(1, None), (None, 2)])
def test_half_of_a_rank_is_refused(rank, size) -> None:
    with pytest.raises(ValueError, match="give dp_rank and dp_size together"):
        resolve_ranks(rank, size, None)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_its_size_is_refused(rank, size) -> None:
    with pytest.raises(ValueError, match=f"dp_rank {rank} is outside the {size} ranks"):
        resolve_ranks(rank, size, None)
