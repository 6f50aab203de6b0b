"""The loader among torch's own: upstream's call, DataLoader workers, process groups, StatefulDataLoader."""

import logging
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from dspark_store import CachedDSparkDataset, CacheLoader, build_cached_dspark_dataloader, open_cache
from tests.stores import BuiltStore, build_store
from tests.upstream import same, write_cache

SAMPLES, BATCH = 9, 2
LENGTHS = (1, 20, 7, 8, 9, 13, 20) * 3
FORKED = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
TORCHDATA = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that was written by upstream's functions."""
    place = tmp_path_factory.mktemp("upstream")
    write_cache(place, SAMPLES)
    return place


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuiltStore:
    return build_store(tmp_path_factory.mktemp("store"), lengths=LENGTHS, weights=False)


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> None:
    """Let the server of worker processes import torch once for all of them."""
    get_context("forkserver").set_forkserver_preload(["dspark_store"])


def names_of(batch: dict[str, torch.Tensor]) -> list[tuple[int, ...]]:
    """A batch's samples, by their ids: upstream's batches do not number them."""
    return [tuple(row.tolist()) for row in batch["input_ids"]]


def test_upstreams_call_gives_the_four_keys_and_every_sample(upstream: Path) -> None:
    loader = build_cached_dspark_dataloader(cache_dir=upstream, batch_size=BATCH, shuffle=True)
    batches = list(loader)
    assert len(batches) == len(loader) == 5
    assert [len(batch["input_ids"]) for batch in batches] == [2, 2, 2, 2, 1]
    dataset = CachedDSparkDataset(upstream)
    assert all(set(batch) == set(dataset[0]) for batch in batches)
    seen = sorted(name for batch in batches for name in names_of(batch))
    assert seen == sorted(tuple(dataset[index]["input_ids"].tolist()) for index in range(SAMPLES))


def test_upstreams_loader_has_the_attributes_that_scripts_use(upstream: Path) -> None:
    loader = build_cached_dspark_dataloader(cache_dir=upstream, batch_size=BATCH, shuffle=True)
    assert loader.batch_size == BATCH
    assert len(loader.dataset) == SAMPLES  # type: ignore[arg-type]  # it has a length
    before = [names_of(batch) for batch in loader]
    loader.sampler.set_epoch(0)  # type: ignore[union-attr]  # both kinds of loaders have it
    assert [names_of(batch) for batch in loader] == before
    assert [names_of(batch) for batch in loader] != before


def test_the_seed_of_torch_decides_upstreams_order(upstream: Path) -> None:
    def order(seed: int) -> list[list[tuple[int, ...]]]:
        torch.manual_seed(seed)
        loader = build_cached_dspark_dataloader(cache_dir=upstream, batch_size=BATCH, shuffle=True)
        return [names_of(batch) for batch in loader]

    assert order(5) == order(5)
    assert order(5) != order(6)


def test_workers_give_the_same_batches_as_threads_epoch_after_epoch(upstream: Path) -> None:
    def loader(num_workers: int) -> Any:
        torch.manual_seed(7)
        return build_cached_dspark_dataloader(
            cache_dir=upstream, batch_size=BATCH, shuffle=True, num_workers=num_workers
        )

    threads, workers = loader(0), loader(2)
    assert len(threads) == len(workers)
    epochs = [[list(kind), list(kind)] for kind in (threads, workers)]
    for epoch, other in zip(*epochs, strict=True):
        assert all(same(one, two) for one, two in zip(epoch, other, strict=True))
    assert [names_of(batch) for batch in epochs[0][0]] != [names_of(batch) for batch in epochs[0][1]]
    workers.sampler.set_epoch(0)
    assert all(same(one, two) for one, two in zip(epochs[0][0], workers, strict=True))


@FORKED
def test_forked_workers_read_though_their_parent_is_reading(upstream: Path) -> None:
    dataset = CachedDSparkDataset(upstream)
    parent = CacheLoader(dataset.cache, 1, min_supervised=0, prefetch_bytes=1, dp_rank=0, dp_size=1)
    reading = iter(parent)
    next(reading)
    loader = DataLoader(
        dataset,
        batch_size=BATCH,
        num_workers=2,
        multiprocessing_context="fork",
        timeout=60,
    )
    for _ in range(2):
        batches = list(loader)
        assert all(
            same(batch, dataset.cache.read(range(index * BATCH, min(SAMPLES, (index + 1) * BATCH))))
            for index, batch in enumerate(batches)
        )
    assert len(list(reading)) == SAMPLES - 1


@FORKED
def test_a_loader_in_a_worker_process_says_that_it_needs_none(built: BuiltStore) -> None:
    loader = CacheLoader(open_cache(built.path), 4, dp_rank=0, dp_size=1)
    workers = DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=60)
    with pytest.raises(ValueError, match="use it with num_workers=0"):
        next(iter(workers))


@pytest.mark.parametrize("options", [{}, {"batch_size": 4}])
def test_a_loader_whose_batches_would_be_batched_again_says_what_to_write(
    options: dict[str, Any], built: BuiltStore
) -> None:
    with CacheLoader(built.path, 4, dp_rank=0, dp_size=1) as loader:
        with pytest.raises(ValueError, match=r"write DataLoader\(loader, batch_size=None\)"):
            next(iter(DataLoader(loader, **options)))
        assert len(list(DataLoader(loader, collate_fn=lambda batches: batches[0]))) == len(loader)
        assert repr(loader).startswith("CacheLoader(Cache(")


def distributed_rank(rank: int, cache: Path, rendezvous: Path) -> tuple[list[list[list[tuple[int, ...]]]], list[str]]:
    """Run upstream's call on one of two ranks: the samples of every batch of two epochs, and what was logged."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dspark_store").addHandler(handler)
    logging.getLogger("dspark_store").setLevel(logging.INFO)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    try:
        loader = build_cached_dspark_dataloader(cache_dir=cache, batch_size=BATCH, shuffle=True, distributed=True)
        epochs = []
        for epoch in (0, 1, 0):
            loader.sampler.set_epoch(epoch)  # type: ignore[union-attr]  # both kinds of loaders have it
            epochs.append([names_of(batch) for batch in loader])
        return epochs, logged
    finally:
        dist.destroy_process_group()


def test_two_ranks_share_an_epoch_and_repeat_to_the_same_length(upstream: Path, tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("forkserver")) as pool:
        ranks = list(pool.map(distributed_rank, (0, 1), (upstream,) * 2, (tmp_path / "rendezvous",) * 2))
    names = {tuple(CachedDSparkDataset(upstream)[index]["input_ids"].tolist()) for index in range(SAMPLES)}
    first, second, again = zip(*(epochs for epochs, _ in ranks), strict=True)
    for epoch in (first, second):
        assert [[len(batch) for batch in batches] for batches in epoch] == [[2, 2, 1]] * 2
        given_out = [name for batches in epoch for batch in batches for name in batch]
        assert set(given_out) == names
    assert first == again
    assert first != second
    for _, logged in ranks:
        assert "an epoch repeats 1 samples to fill its last batch on every rank" in logged


def stateful(built: BuiltStore) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="needs the extra stateful")
    loader = CacheLoader(open_cache(built.path), 4, last="short", dp_rank=0, dp_size=1)
    return module.StatefulDataLoader(loader, batch_size=None, num_workers=0)


@TORCHDATA
@pytest.mark.parametrize("taken", [0, 1, 3, 5])
def test_a_stateful_dataloader_goes_on_where_it_was_saved(built: BuiltStore, taken: int) -> None:
    loader = stateful(built)
    whole = [[batch["sample"].tolist() for batch in loader] for _ in range(2)]
    assert [len(epoch) for epoch in whole] == [5, 5]
    stopped = stateful(built)
    iteration = iter(stopped)
    seen = [next(iteration)["sample"].tolist() for _ in range(taken)]
    state = stopped.state_dict()
    resumed = stateful(built)
    resumed.load_state_dict(state)
    assert seen + [batch["sample"].tolist() for batch in resumed] == whole[0]
    assert [batch["sample"].tolist() for batch in resumed] == whole[1]


@TORCHDATA
def test_a_stateful_dataloader_saved_between_epochs_goes_on_with_the_next(built: BuiltStore) -> None:
    loader, finished, resumed = stateful(built), stateful(built), stateful(built)
    whole = [[batch["sample"].tolist() for batch in loader] for _ in range(2)]
    list(finished)
    resumed.load_state_dict(finished.state_dict())
    assert [batch["sample"].tolist() for batch in resumed] == whole[1]
