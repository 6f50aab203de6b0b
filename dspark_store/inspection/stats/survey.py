"""One pass over a store: which samples and states are read, and the merged tally of all shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from uuid import uuid4

import numpy as np

from dspark_store.inspection.shardwise import map_shards
from dspark_store.inspection.stats.merge_tree import MergeTree
from dspark_store.inspection.stats.shard_survey import ShardSurvey, ShardTally
from dspark_store.readers.cache import Cache
from dspark_store.readers.order import epoch_order


@dataclass(frozen=True, slots=True)
class Selection:
    """What of a store is read.

    ``layers`` are captured layers by id, None for all; ``last`` says whether the last hidden states are read;
    ``samples`` is how many samples are drawn at random by ``seed``, None for all.
    """

    layers: tuple[int, ...] | None = None
    last: bool = True
    samples: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Survey:
    """What the pass found: the merged tally, None for a store without samples, and what it is of.

    ``layers`` are the ids of the layers in the tally, ascending; ``captured`` the shards whose states can be read.
    """

    tally: ShardTally | None
    layers: tuple[int, ...]
    captured: int


def survey_store(
    cache: Cache,
    selection: Selection,
    *,
    threads: int | None = None,
    scheduler: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Survey:
    """Read the selected samples of every shard once, and of captured shards their states.

    By ``threads`` threads, or by the workers of a dask ``scheduler``, see `map_shards`; the result is the same, bit by
    bit. ``progress`` is called with the samples of each shard that is done. Raises ValueError for a layer that was
    not captured, too few samples or a store in its token phase, and, naming the object, DamagedStoreError or OSError.
    """
    if cache.record.phase == "tokens":
        raise ValueError(
            f"store at {cache.storage} is still in its token phase: its samples cannot be read yet; "
            "ask again when its states are being captured"
        )
    layers = tuple(sorted(set(cache.layer_ids if selection.layers is None else selection.layers)))
    slots = tuple(cache.slots(layers))
    samples = choose_samples(len(cache), selection)
    shards = _shards_of(samples, cache)
    captured = cache.index.committed()
    task = ShardSurvey(
        storage=cache.storage,
        store_id=cache.record.store_id,
        survey=uuid4().hex,
        samples=samples,
        captured=frozenset(captured),
        slots=slots,
        last=selection.last,
        vocabulary=vocabulary_size(cache),
    )
    tree = MergeTree[ShardTally](len(shards))
    places = {shard: place for place, shard in enumerate(shards)}
    with task:
        for shard, part in map_shards(task, shards, threads=threads, scheduler=scheduler):
            tree.add(places[shard], part)
            if progress is not None:
                progress(part.samples)
    return Survey(tree.result(), layers, len(captured))


def choose_samples(count: int, selection: Selection) -> np.ndarray | None:
    """Return the samples to read of ``count``, ascending int64; None for all. ValueError when none are asked for.

    The draw depends on the seed and the number of samples alone.
    """
    if selection.samples is None:
        return None
    if selection.samples < 1:
        raise ValueError(f"--samples must be >= 1, got {selection.samples}")
    return np.sort(epoch_order(count, seed=selection.seed, epoch=0)[: selection.samples])


def _shards_of(samples: np.ndarray | None, cache: Cache) -> list[int]:
    if samples is None:
        return list(range(cache.schema.tokens.num_shards))
    shards: list[int] = np.unique(samples // cache.schema.shard_size).tolist()
    return shards


def vocabulary_size(cache: Cache) -> int | None:
    """Return how many ids the target knows, None where the manifest does not say."""
    size = cache.manifest.get("target_vocab_size")
    return size if isinstance(size, int) and size > 0 else None
