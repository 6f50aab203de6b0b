import dataclasses
import multiprocessing

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # in C, not in __all__

from dspark_store.cli.train import parse_arguments
from dspark_store.training.checkpoint import found_checkpoint
from dspark_store.training.ranks import Ranks, joined_ranks
from tests.training.runs import flags, run
from tests.training.started import end_with_the_same_error

LIMIT = 120
CPU = torch.device("cpu")
ALONE = Ranks(0, 1, CPU)


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


@pytest.fixture
def port():
    """The port of a store that this process keeps, as torchrun's agent does over restarts."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def test_an_error_of_all_ranks_is_told_once_in_each_start_on_one_store(port, tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training.started"])
    for start in ("first", "restart"):
        place = tmp_path / start
        place.mkdir()
        ranks = [context.Process(target=end_with_the_same_error, args=(rank, port, place)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(LIMIT)
            assert rank.exitcode == 0
        assert sorted(path.name.partition("-")[0] for path in place.iterdir()) == ["tells", "told"]
        assert [path.read_text() for path in place.iterdir()] == ["3 ValueError"] * 2


def test_an_error_of_the_only_rank_is_its_own(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    places: list[tuple[int, int]] = []

    def end():
        with joined_ranks(CPU) as ranks:
            places.append((ranks.rank, ranks.size))
            raise ValueError("in these words")

    for _ in range(2):
        with pytest.raises(ValueError, match="in these words"):
            end()
    assert places == [(0, 1)] * 2
