import pytest
import torch

from dspark_store.cli.precompute import config_of
from dspark_store.format.schema import LAST, LAYERS
from dspark_store.precompute.__main__ import main
from dspark_store.readers.cache import open_cache
from dspark_store.readers.loader import CacheLoader
from dspark_store.training.online import open_live
from dspark_store.training.ranks import Ranks
from tests.training.runs import write_online

ALONE = Ranks(0, 1, torch.device("cpu"))


def opened(file, tokens):
    return open_live(config_of(str(file), {"output_dir": str(tokens)}), ALONE)


@pytest.fixture(scope="module")
def live(llama, chats, tmp_path_factory):
    directory = tmp_path_factory.mktemp("live")
    return opened(write_online(directory / "job.yaml", llama, chats), directory / "tokens")


@pytest.mark.parametrize(("layout", "layers"), [("flat", [3, 1]), ("stacked", None)])
def test_a_live_target_gives_the_batches_of_its_store(live, store, layout, layers):
    batches = [
        list(CacheLoader(cache, 3, seed=1, shape="longest", layout=layout, layers=layers, last="short"))
        for cache in (live, open_cache(store))
    ]
    assert len(batches[0]) == len(batches[1]) == 4
    for first, second in zip(*batches, strict=True):
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_live_target_is_run_in_the_batches_that_fit_into_the_files_tokens(llama, chats, tmp_path):
    file = write_online(tmp_path / "job.yaml", llama, chats, batch_size=None, batch_tokens=160)
    assert main(["-c", str(file), "--output-dir", str(tmp_path / "store")]) == 0
    batches = [cache.read(range(11)) for cache in (opened(file, tmp_path / "tokens"), open_cache(tmp_path / "store"))]
    assert all(torch.equal(batches[0][name], batches[1][name]) for name in (LAYERS, LAST))


def test_rows_cut_to_a_span_of_positions_are_those_of_the_store(live, store):
    batches = [
        next(iter(CacheLoader(cache, 4, shuffle=False, positions=slice(5, 40), columns=(LAYERS, LAST))))
        for cache in (live, open_cache(store))
    ]
    assert all(torch.equal(batches[0][name], batches[1][name]) for name in (LAYERS, LAST))


def test_the_targets_tables_and_facts_are_those_of_the_store(live, store):
    stored = open_cache(store)
    assert torch.equal(live.weights().embed, stored.weights().embed)
    assert torch.equal(live.weights().head, stored.weights().head)
    assert live.head == stored.head
    assert live.target_config == stored.target_config


def test_tokens_are_made_once_and_those_of_another_job_are_refused(llama, chats, tmp_path):
    file = write_online(tmp_path / "job.yaml", llama, chats)
    first = opened(file, tmp_path / "tokens")
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "tokens").rglob("*") if path.is_file()}
    assert opened(file, tmp_path / "tokens").lengths.tolist() == first.lengths.tolist()
    assert files == {path: path.stat().st_mtime_ns for path in files}
    write_online(file, llama, chats, seq_length=64)
    with pytest.raises(ValueError, match="seq_length"):
        opened(file, tmp_path / "tokens")


def test_a_target_that_needs_several_ranks_is_refused(llama, chats, tmp_path):
    file = write_online(tmp_path / "job.yaml", llama, chats, tp_size=2)
    with pytest.raises(ValueError, match="online training runs a whole target on each rank"):
        opened(file, tmp_path / "tokens")
