"""One pass over a store: what each shard gives to its statistics, and the merged tally of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self
from uuid import uuid4

import numpy as np
import torch

from dspark_store.format.schema import IDS, LAST, LAYERS, MASK
from dspark_store.format.storage import Storage
from dspark_store.inspection.samples import check_foreign_tokens
from dspark_store.inspection.shardwise import MergeTree, Workers, merge_known
from dspark_store.inspection.sizes import shared_slot
from dspark_store.inspection.stats.tallies import (
    NO_NUMBERS,
    Moments,
    StateTally,
    TokenTally,
    cosines,
    empty_tally,
    empty_tokens,
    tally_block,
    tally_tokens,
)
from dspark_store.progress import start_progress
from dspark_store.readers.cache import Cache
from dspark_store.readers.order import epoch_order
from dspark_store.readers.tensors import chosen_slots

_READ_BYTES = 32 * 1024 * 1024
_BLOCK_BYTES = 2 * 1024 * 1024
_ROW_TOKENS = 1024 * 1024


@dataclass(frozen=True, slots=True)
class StatesTally:
    """The states of some samples: a tally a layer, the last hidden states', and the cosines between neighbours.

    ``layers`` are in the order asked for and ``neighbours[i]`` stands between layers i and i + 1. ``last`` is None
    where it was not asked for; ``shared`` is the slot whose object it is, None where it has its own, or where
    the shards do not agree.
    """

    samples: int
    layers: tuple[StateTally, ...]
    neighbours: tuple[Moments[float], ...]
    last: StateTally | None
    shared: int | None

    def merge(self, later: StatesTally) -> StatesTally:
        """Return the tally of both."""
        return StatesTally(
            self.samples + later.samples,
            tuple(one.merge(other) for one, other in zip(self.layers, later.layers, strict=True)),
            tuple(one.merge(other) for one, other in zip(self.neighbours, later.neighbours, strict=True)),
            merge_known(self.last, later.last),
            self.shared if self.shared == later.shared else None,
        )


@dataclass(frozen=True, slots=True)
class ShardTally:
    """What a shard gave. ``states`` is None where it is not captured yet."""

    samples: int
    tokens: TokenTally
    states: StatesTally | None

    def merge(self, later: ShardTally) -> ShardTally:
        """Return the tally of both."""
        return ShardTally(
            self.samples + later.samples, self.tokens.merge(later.tokens), merge_known(self.states, later.states)
        )


@dataclass(frozen=True, slots=True)
class ShardSurvey:
    """Reads shards of a store: called with a shard, it returns its tally, the same every time and everywhere.

    ``samples`` are those to read, ascending, None for all; ``captured`` the shards whose states are read; ``slots``
    the layers, and ``last`` whether the last hidden states too; ``vocabulary`` how many ids the target knows. Processes
    open the store once for each ``survey``, a name of its own; as a context it lets go of what this process opened.
    """

    storage: Storage
    store_id: str
    survey: str
    samples: np.ndarray | None
    captured: frozenset[int]
    slots: tuple[int, ...]
    last: bool
    vocabulary: int | None

    def __call__(self, shard: int) -> ShardTally:
        """Tally a shard; DamagedStoreError or OSError naming what cannot be read."""
        cache = _opened(self.storage, self.store_id, self.survey)
        rows = self._rows(cache, shard)
        tokens = empty_tokens(self.vocabulary)
        for ids, mask in _read_tokens(cache, rows):
            tokens = tokens.merge(tally_tokens(ids, mask, self.vocabulary))
        states = self._states(cache, shard, rows) if shard in self.captured else None
        return ShardTally(len(rows), tokens, states)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let the store go that this process opened."""
        _opened.cache_clear()

    def _rows(self, cache: Cache, shard: int) -> list[int]:
        rows = cache.schema.tokens.rows(shard)
        if self.samples is None:
            return list(rows)
        first, stop = np.searchsorted(self.samples, (rows.start, rows.stop))
        chosen: list[int] = self.samples[first:stop].tolist()
        return chosen

    def _states(self, cache: Cache, shard: int, rows: Sequence[int]) -> StatesTally:
        shared = shared_slot(cache, [shard]) if self.last else None
        own_last = self.last and shared not in self.slots
        columns = ([LAYERS] if self.slots else []) + ([LAST] if own_last else [])
        schema = cache.schema
        tallies = [empty_tally(schema.hidden_size, schema.dtype) for _ in range(len(self.slots) + own_last)]
        near = [NO_NUMBERS for _ in self.slots[1:]]
        for states, starts_sample in _read_states(cache, rows, columns, self.slots):
            blocks = [tally_block(layer, schema.dtype, starts_sample=starts_sample) for layer in states]
            tallies = [old.merge(new.tally) for old, new in zip(tallies, blocks, strict=True)]
            near = [old.merge(cosines(blocks[at], blocks[at + 1])) for at, old in enumerate(near)]
        layers = tuple(tallies[: len(self.slots)])
        last = tallies[-1] if own_last else None if shared is None else layers[self.slots.index(shared)]
        return StatesTally(len(rows), layers, tuple(near), last, shared)


def _read_tokens(cache: Cache, rows: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield ids and mask of some whole samples, (tokens,) each, some rows at a time."""
    step = max(1, _ROW_TOKENS // cache.schema.seq_length)
    for first in range(0, len(rows), step):
        some = rows[first : first + step]
        batch = cache.read(some, columns=(IDS, MASK))
        valid = np.arange(cache.schema.seq_length) < cache.lengths[some][:, None]
        ids, masks = batch[IDS].numpy(), batch[MASK].numpy()
        for sample, row, mask, there in zip(some, ids, masks, valid, strict=True):
            check_foreign_tokens(cache, sample, row[there], mask[there])
        yield ids[valid], masks[valid]


def _read_states(
    cache: Cache, rows: Sequence[int], columns: Sequence[str], slots: Sequence[int]
) -> Iterator[tuple[list[torch.Tensor], bool]]:
    """Yield blocks of tokens of one sample: a tensor (tokens, H) a layer, and whether they begin the sample.

    Every chunk is read once, and at most about 32 MiB of all layers at a time. The blocks do not depend on how fast
    anything is, so that their sums are always the same.
    """
    schema = cache.schema
    if not columns:
        return
    layers = [cache.layer_ids[slot] for slot in slots]
    token_bytes = schema.hidden_size * schema.dtype.itemsize * (len(slots) + (LAST in columns))
    step = schema.chunk_tokens * max(1, _READ_BYTES // (token_bytes * schema.chunk_tokens))
    block = max(1, _BLOCK_BYTES // (8 * schema.hidden_size))
    for row in rows:
        length = int(cache.lengths[row])
        for start in range(0, length, step):
            span = slice(start, min(start + step, length))
            batch = cache.read([row], columns=columns, layers=layers, positions=span, layout="stacked")
            states = [*batch[LAYERS][0]] if LAYERS in batch else []
            states += [batch[LAST][0]] if LAST in batch else []
            for at in range(0, span.stop - span.start, block):
                yield [layer[at : at + block] for layer in states], start + at == 0


@lru_cache(maxsize=2)
def _opened(storage: Storage, store_id: str, survey: str) -> Cache:  # noqa: ARG001 - opened anew for every survey
    """Open a store once a process and survey."""
    cache = Cache(storage, allow_incomplete=True)
    if cache.record.store_id != store_id:
        raise ValueError(f"{storage} holds another store now than when its statistics were begun")
    return cache


@dataclass(frozen=True, slots=True)
class Rules:
    """What of a store is read, and by which measure.

    ``layers`` are captured layers by id, None for all; ``last`` says whether the last hidden states are read;
    ``samples`` is how many samples are drawn at random by ``seed``, None for all; ``outlier_factor`` see
    `summarise_layer`.
    """

    layers: tuple[int, ...] | None = None
    last: bool = True
    samples: int | None = None
    seed: int = 0
    outlier_factor: float = 10.0

    def __post_init__(self) -> None:
        if self.samples is not None and self.samples < 1:
            raise ValueError(f"--samples must be >= 1, got {self.samples}")
        if not self.outlier_factor >= 1:
            raise ValueError(f"--outlier-factor must be >= 1, got {self.outlier_factor}")


@dataclass(frozen=True, slots=True)
class StatsSurvey:
    """What the pass found: the merged tally, and what it is of.

    ``layers`` are the ids of the layers in the tally, ascending; ``captured`` the shards whose states can be read.
    """

    tally: ShardTally
    layers: tuple[int, ...]
    captured: int


def tally_store(cache: Cache, rules: Rules, workers: Workers | None = None) -> StatsSurvey:
    """Read the selected samples of every shard once, and of captured shards their states.

    ``workers`` do it, by default this process's threads; the result is the same, bit by bit. Raises ValueError for a
    layer that was not captured or a store in its token phase, and, naming the object, DamagedStoreError or OSError.
    """
    if cache.record.phase == "tokens":
        raise ValueError(
            f"store at {cache.storage} is still in its token phase: its samples cannot be read yet; "
            "ask again when its states are being captured"
        )
    layers = tuple(sorted(set(cache.layer_ids if rules.layers is None else rules.layers)))
    slots = tuple(chosen_slots(cache.schema, layers))
    samples = choose_samples(len(cache), rules)
    chosen: Sequence[int] = range(cache.schema.tokens.num_shards)
    if samples is not None:
        chosen = np.unique(samples // cache.schema.shard_size).tolist()
    captured = cache.index.committed()
    task = ShardSurvey(
        storage=cache.storage,
        store_id=cache.record.store_id,
        survey=uuid4().hex,
        samples=samples,
        captured=frozenset(captured),
        slots=slots,
        last=rules.last,
        vocabulary=vocabulary_size(cache),
    )
    tree = MergeTree[ShardTally](len(chosen))
    places = {shard: place for place, shard in enumerate(chosen)}
    with task, start_progress("stats", len(cache) if samples is None else len(samples), "samples") as progress:
        for shard, part in (workers or Workers()).each(task, chosen):
            tree.add(places[shard], part)
            progress.advance(part.samples)
    return StatsSurvey(tree.result() or ShardTally(0, empty_tokens(None), None), layers, len(captured))


def choose_samples(count: int, rules: Rules) -> np.ndarray | None:
    """Return the samples to read of ``count``, ascending int64; None for all.

    The draw depends on the seed and the number of samples alone.
    """
    if rules.samples is None:
        return None
    return np.sort(epoch_order(count, seed=rules.seed, epoch=0)[: rules.samples])


def vocabulary_size(cache: Cache) -> int | None:
    """Return how many ids the target knows, None where the manifest does not say."""
    size = cache.manifest.get("target_vocab_size")
    return size if isinstance(size, int) and size > 0 else None
