import dataclasses

import pytest
import torch
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]  # in C, not in __all__

from dspark_store.cli.train import parse_arguments
from dspark_store.training.loop import found_checkpoint
from dspark_store.training.ranks import Ranks, ToldError, _is_told, joined_ranks, leads
from tests.training.runs import flags, run

ALONE = Ranks(0, 1, torch.device("cpu"))


@dataclasses.dataclass(frozen=True)
class Beside(Ranks):
    """One of two ranks, the other of which finds something else."""

    def gathered(self, values):
        return [values, values + 4]


def test_a_rank_alone_is_all_ranks():
    values = torch.arange(3.0)
    assert ALONE.total(values) is values
    assert ALONE.gathered(values) == [values]


def test_ranks_that_find_different_checkpoints_are_refused(store, tmp_path):
    run(tmp_path / "run", "--store", store, "--max-steps", 1)
    config = parse_arguments(flags(tmp_path / "run", "--store", store, "--resume"))
    found = found_checkpoint(config, ALONE)
    assert found is not None
    assert found.name == "step-00000001"
    with pytest.raises(ValueError, match=r"different newest checkpoints in .* of step 1 and of step 5"):
        found_checkpoint(config, Beside(0, 2, torch.device("cpu")))


def test_an_error_is_told_by_the_first_rank_that_has_it():
    store = HashStore()
    told = [_is_told(store, error) for error in (ValueError("a"), ValueError("b"), ValueError("a"), OSError("a"))]
    assert told == [False, False, True, False]


@pytest.fixture
def torchrun(monkeypatch):
    """The environment that torchrun gives the only rank, and the store that it keeps."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    names = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    for name, value in {**names, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    return store


def ended(error):
    with joined_ranks(torch.device("cpu")) as ranks:
        assert (ranks.rank, ranks.size) == (0, 1)
        raise error


def test_what_ends_a_rank_is_raised_as_it_is_once(torchrun):
    with pytest.raises(ValueError, match="in these words"):
        ended(ValueError("in these words"))
    with pytest.raises(ToldError, match="in these words") as told:
        ended(ValueError("in these words"))
    assert isinstance(told.value.__cause__, ValueError)


def test_rank_0_leads_and_so_does_a_process_alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert leads()
    monkeypatch.setenv("RANK", "0")
    assert leads()
    monkeypatch.setenv("RANK", "1")
    assert not leads()
