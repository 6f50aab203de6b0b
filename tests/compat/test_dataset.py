"""The reading half of the upstream interface: samples, and loaders of them."""

from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset

import dspark_store as ds
from tests.upstream import LENGTH, WIDTH, row, same, write_cache


def test_a_sample_of_the_short_last_shard_is_what_was_written(tmp_path):
    shards = write_cache(tmp_path, 3)
    assert same(ds.CachedDSparkDataset(tmp_path)[2], row(shards[1], 0))


def test_a_loader_gives_whole_batches_in_order(tmp_path):
    shards = write_cache(tmp_path, 4)
    batches = list(ds.build_cached_dspark_dataloader(cache_dir=tmp_path, batch_size=2, shuffle=False))
    assert len(batches) == 2
    assert batches[0]["target_hidden_states"].shape == (2, LENGTH, 48)
    assert batches[0]["target_last_hidden_states"].shape == (2, LENGTH, WIDTH)
    assert all(same(batch, shard) for batch, shard in zip(batches, shards, strict=True))


def test_reading_from_the_middle_fetches_nothing_before_it(tmp_path, monkeypatch):
    shards = write_cache(tmp_path, 6)
    dataset = ds.CachedDSparkDataset(tmp_path)
    read, fetched = dataset.cache.read, []

    def noted(rows):
        fetched.extend(rows)
        return read(rows)

    monkeypatch.setattr(dataset.cache, "read", noted)
    (batch,) = DataLoader(Subset(dataset, range(4, 6)), batch_size=2)
    assert fetched == [4, 5]
    assert same(batch, shards[2])


def test_a_plain_torch_loader_takes_the_dataset(tmp_path):
    shards = write_cache(tmp_path, 4)
    dataset = ds.CachedDSparkDataset(tmp_path)
    assert all(same(batch, shard) for batch, shard in zip(DataLoader(dataset, batch_size=2), shards, strict=True))


def test_an_index_past_either_end_is_an_index_error(tmp_path):
    write_cache(tmp_path, 5)
    dataset = ds.CachedDSparkDataset(tmp_path)
    assert ds.existing_shard_indices(tmp_path) == {0, 1, 2}
    assert same(dataset[-1], dataset[4])
    for index in (99, 5, -6):
        with pytest.raises(IndexError):
            dataset[index]


def test_a_shuffled_loader_gives_every_sample_once(tmp_path):
    shards = write_cache(tmp_path, 6)
    loader = ds.build_cached_dspark_dataloader(cache_dir=tmp_path, batch_size=4, shuffle=True)
    read = torch.cat([batch["target_last_hidden_states"] for batch in loader])
    written = torch.cat([shard["target_last_hidden_states"] for shard in shards])
    assert sorted(read.sum((1, 2)).tolist()) == sorted(written.sum((1, 2)).tolist())


def test_worker_processes_give_the_same_batches_epoch_after_epoch(tmp_path):
    get_context("forkserver").set_forkserver_preload(["dspark_store"])  # imports torch once for both
    shards = write_cache(tmp_path, 4)
    loader = ds.build_cached_dspark_dataloader(cache_dir=tmp_path, batch_size=2, shuffle=False, num_workers=2)
    for _ in range(2):
        assert all(same(batch, shard) for batch, shard in zip(loader, shards, strict=True))


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_distributed_loader_takes_its_rank_from_the_process_group(tmp_path, one_rank):
    shards = write_cache(tmp_path / "cache", 3)
    loader = ds.build_cached_dspark_dataloader(
        cache_dir=tmp_path / "cache", batch_size=2, shuffle=False, distributed=True
    )
    assert isinstance(loader, ds.CacheLoader)
    assert (loader.dp_rank, loader.dp_size) == (0, 1)
    assert all(same(batch, shard) for batch, shard in zip(loader, shards, strict=True))
