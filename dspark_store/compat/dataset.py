"""The interface of NeMo Automodel's DSpark offline cache, on this format: its reading half."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from os import PathLike
from types import SimpleNamespace
from typing import cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from dspark_store.compat.automodel import ensure_manifest_complete, existing_shard_indices, read_manifest
from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.metadata import read_record
from dspark_store.format.storage import LocalStorage
from dspark_store.readers.cache import Cache, open_cache
from dspark_store.readers.index import read_weights
from dspark_store.readers.loader import CacheLoader


class CachedDSparkDataset(Dataset[dict[str, torch.Tensor]]):
    """Samples of a finished store, for a torch DataLoader.

    An item is what `Cache` gives: four keys, padded to S. Raises FileNotFoundError (no store) or ValueError
    (``incomplete``, ``shard indices`` when shards are missing, or a target cut to its first layers, which
    ``allow_reduced_depth`` admits).
    """

    def __init__(self, cache_dir: str | PathLike[str], *, allow_reduced_depth: bool = False) -> None:
        self.manifest: dict[str, JsonValue] = read_manifest(cache_dir, allow_incomplete=True)
        ensure_manifest_complete(self.manifest, cache_dir)
        record = read_record(LocalStorage(cache_dir))
        present, expected = existing_shard_indices(cache_dir), set(range(record.schema.tokens.num_shards))
        if present != expected or not record.complete:
            raise ValueError(
                f"shard indices of {cache_dir} do not match its manifest: {record.schema.num_samples} samples need "
                f"{len(expected)} shards; missing {sorted(expected - present)[:5]}, "
                f"extra {sorted(present - expected)[:5]}"
            )
        self.cache: Cache = open_cache(cache_dir, allow_reduced_depth=allow_reduced_depth)

    def __len__(self) -> int:
        return len(self.cache)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.cache[index]

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        """Return several samples, read as one batch: torch's DataLoader calls this instead of one item at a time."""
        batch = self.cache.read(indices)
        return [{name: values[row] for name, values in batch.items()} for row in range(len(indices))]


class _Batches(CachedDSparkDataset):
    """The dataset of our own DataLoader: what it fetches is the batch already."""

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return self.cache.read(indices)


def build_cached_dspark_dataloader(
    *,
    cache_dir: str | PathLike[str],
    batch_size: int,
    shuffle: bool,
    num_workers: int = 0,
    distributed: bool = False,
    allow_reduced_depth: bool = False,
) -> CacheLoader | DataLoader[dict[str, torch.Tensor]]:
    """Return a loader of batches of a finished store: the four keys, each with a first axis of ``batch_size``.

    Without worker processes it is a `CacheLoader`, which reads ahead in threads; with ``num_workers`` a torch
    DataLoader whose processes are started by forkserver. Both give the same batches. ``distributed`` splits the samples
    over the default process group, and repeats as many as make them even, which the log counts; the last batch may be
    short. ``loader.sampler.set_epoch`` chooses the epoch's order. ``allow_reduced_depth`` as for `CachedDSparkDataset`.
    """
    dataset = _Batches(cache_dir, allow_reduced_depth=allow_reduced_depth)
    loader = CacheLoader(
        dataset.cache,
        batch_size,
        shuffle=shuffle,
        seed=0 if distributed else torch.initial_seed(),
        last="even" if distributed else "short",
        min_supervised=0,
        dp_rank=None if distributed else 0,
        dp_size=None if distributed else 1,
        index_fields=False,
    )
    if not num_workers:
        return loader
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=EpochSampler(loader),
        num_workers=num_workers,
        collate_fn=cast("Callable[[list[object]], object]", _already_a_batch),
        pin_memory=torch.cuda.is_available(),
        multiprocessing_context="forkserver",
        persistent_workers=True,
    )


class EpochSampler(Sampler[int]):
    """The samples of a `CacheLoader`'s epochs, one by one, for torch's DataLoader with worker processes."""

    def __init__(self, loader: CacheLoader) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration give an epoch's order; without this, each one gives the next epoch."""
        self._loader.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._loader.epoch_samples())

    def __iter__(self) -> Iterator[int]:
        samples = self._loader.epoch_samples().tolist()
        self._loader.set_epoch(self._loader.epoch + 1)
        return iter(samples)


def _already_a_batch(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return batch


def read_target_weight_modules(cache_dir: str | PathLike[str]) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Return the target's embedding and head, each as an object with a ``weight`` (V, H) in the cache dtype.

    FileNotFoundError when the store has none.
    """
    storage = LocalStorage(cache_dir)
    weights = read_weights(storage, read_record(storage))
    return SimpleNamespace(weight=weights.embed), SimpleNamespace(weight=weights.head)
