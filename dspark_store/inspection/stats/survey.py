"""The statistics of a store, from one pass over it: what ``stats.json`` holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Self

import numpy as np
import torch

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.schema import IDS, LAST, LAYERS, MASK
from dspark_store.inspection.samples import check_foreign_tokens
from dspark_store.inspection.shardwise import MergeTree, Workers
from dspark_store.inspection.sizes import shared_slot
from dspark_store.inspection.stats.figures import (
    Decode,
    spread,
    summarise_ids,
    summarise_layer,
    summarise_lengths,
    summarise_sources,
    summarise_supervision,
)
from dspark_store.inspection.stats.tallies import (
    NO_NUMBERS,
    Moments,
    StateTally,
    Tally,
    TokenTally,
    cosines,
    empty_tally,
    tally_block,
    tally_tokens,
)
from dspark_store.progress import start_progress
from dspark_store.readers.cache import Cache
from dspark_store.readers.order import epoch_order
from dspark_store.readers.tensors import chosen_slots

STATISTICS_VERSION = 1
_READ_BYTES = 32 * 1024 * 1024
_BLOCK_BYTES = 2 * 1024 * 1024
_ROW_TOKENS = 1024 * 1024


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
class ShardTally(Tally):
    """Tokens of ``samples`` samples, and the states of the ``captured`` ones of them.

    ``states`` are those of the layers in rising order, then of last hidden states that are no layer's own objects;
    ``neighbours[i]`` has the cosines between layers i and i + 1. Both are None before any state is captured.
    """

    samples: int
    tokens: TokenTally
    captured: int
    states: tuple[StateTally, ...] | None
    neighbours: tuple[Moments[float], ...] | None


@dataclass(frozen=True, slots=True)
class ShardSurvey:
    """Reads shards of a store: called with a shard, it returns its tally, the same every time and everywhere.

    ``samples`` are those to read, ascending int64, None for all; ``captured`` the shards whose states are read;
    ``layers`` those to read by id, ascending, and ``last`` whether the last hidden states too, which may be the very
    objects of the layer ``shared``.
    """

    cache: Cache
    store_id: str
    samples: np.ndarray | None
    captured: frozenset[int]
    layers: tuple[int, ...]
    last: bool
    shared: int | None

    @classmethod
    def of(cls, cache: Cache, rules: Rules) -> Self:
        """Plan the reading of a store; ValueError for a layer that was not captured or a store in its token phase."""
        if cache.record.phase == "tokens":
            raise ValueError(
                f"store at {cache.storage} is still in its token phase: its samples cannot be read yet; "
                "ask again when its states are being captured"
            )
        layers = tuple(sorted(set(cache.layer_ids if rules.layers is None else rules.layers)))
        chosen_slots(cache.schema, layers)
        samples = None
        if rules.samples is not None:  # the draw depends on the seed and the number of samples alone
            samples = np.sort(epoch_order(len(cache), seed=rules.seed, epoch=0)[: rules.samples])
        captured = cache.index.committed()
        slot = shared_slot(cache, captured) if rules.last and captured else None
        shared = None if slot is None else cache.schema.layer_id(slot)
        return cls(cache, cache.record.store_id, samples, frozenset(captured), layers, rules.last, shared)

    def run(self, workers: Workers) -> ShardTally:
        """Read every shard once and merge what they give, bit by bit the same however many workers do it.

        Raises, naming the object, DamagedStoreError or OSError for what cannot be read.
        """
        grid = self.cache.schema.tokens
        shards = [shard for shard in range(grid.num_shards) if self._rows(shard)]
        tree = MergeTree[ShardTally](len(shards))
        places = {shard: place for place, shard in enumerate(shards)}
        samples = grid.num_samples if self.samples is None else len(self.samples)
        with start_progress("stats", samples, "samples") as progress:
            for shard, part in workers.each(self, shards):
                tree.add(places[shard], part)
                progress.advance(part.samples)
        return tree.result() or ShardTally(0, self._count_tokens([]), 0, None, None)

    def __call__(self, shard: int) -> ShardTally:
        """Tally a shard; DamagedStoreError or OSError naming what cannot be read."""
        if self.cache.record.store_id != self.store_id:  # a worker has opened it anew
            raise ValueError(f"{self.cache.storage} holds another store now than when its statistics were begun")
        rows = self._rows(shard)
        tokens = self._count_tokens(rows)
        if shard not in self.captured:
            return ShardTally(len(rows), tokens, 0, None, None)
        return ShardTally(len(rows), tokens, len(rows), *self._states(rows))

    def _rows(self, shard: int) -> list[int]:
        rows = self.cache.schema.tokens.rows(shard)
        if self.samples is None:
            return list(rows)
        first, stop = np.searchsorted(self.samples, (rows.start, rows.stop))
        chosen: list[int] = self.samples[first:stop].tolist()
        return chosen

    def _count_tokens(self, rows: Sequence[int]) -> TokenTally:
        vocabulary, nothing = vocabulary_size(self.cache), np.zeros(0, np.int64)
        counted = (tally_tokens(ids, mask, vocabulary) for ids, mask in _read_tokens(self.cache, rows))
        return reduce(TokenTally.merge, counted, tally_tokens(nothing, nothing, vocabulary))

    def _states(self, rows: Sequence[int]) -> tuple[tuple[StateTally, ...], tuple[Moments[float], ...]]:
        schema = self.cache.schema
        own_last = self.last and self.shared not in self.layers
        tallies = [empty_tally(schema.hidden_size, schema.dtype)] * (len(self.layers) + own_last)
        near = [NO_NUMBERS] * (len(self.layers) - 1)
        for states, starts_sample in _read_states(self.cache, rows, self.layers, last=own_last):
            blocks = [tally_block(layer, schema.dtype, starts_sample=starts_sample) for layer in states]
            tallies = [old.merge(new.tally) for old, new in zip(tallies, blocks, strict=True)]
            near = [old.merge(cosines(blocks[at], blocks[at + 1])) for at, old in enumerate(near)]
        return tuple(tallies), tuple(near)


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
    cache: Cache, rows: Sequence[int], layers: Sequence[int], *, last: bool
) -> Iterator[tuple[list[torch.Tensor], bool]]:
    """Yield blocks of tokens of one sample: a tensor (tokens, H) a layer, and whether they begin the sample.

    Every chunk is read once, and at most about 32 MiB of all layers at a time. The blocks do not depend on how fast
    anything is, so that their sums are always the same.
    """
    schema = cache.schema
    columns = [*([LAYERS] if layers else []), *([LAST] if last else [])]
    if not columns:
        return
    token_bytes = schema.hidden_size * schema.dtype.itemsize * (len(layers) + last)
    step = schema.chunk_tokens * max(1, _READ_BYTES // (token_bytes * schema.chunk_tokens))
    block = max(1, _BLOCK_BYTES // (8 * schema.hidden_size))
    for row in rows:
        length = int(cache.lengths[row])
        for start in range(0, length, step):
            span = slice(start, min(start + step, length))
            batch = cache.read([row], columns=columns, layers=layers, positions=span, layout="stacked")
            states = [*(batch[LAYERS][0] if layers else ()), *(batch[LAST] if last else ())]
            for at in range(0, span.stop - span.start, block):
                yield [layer[at : at + block] for layer in states], start + at == 0


def vocabulary_size(cache: Cache) -> int | None:
    """Return how many ids the target knows, None where the manifest does not say."""
    size = cache.manifest.get("target_vocab_size")
    return size if isinstance(size, int) and size > 0 else None


def measure_store(
    cache: Cache, rules: Rules, *, workers: Workers | None = None, decode: Decode | None = None
) -> dict[str, JsonValue]:
    """Return the statistics of a store as JSON, in one pass; see `ShardSurvey` for what it takes and raises.

    They are the same, bit by bit, however many threads or workers there are. ``decode`` turns ids into their texts.
    """
    survey = ShardSurvey.of(cache, rules)
    tally = survey.run(workers or Workers())
    schema, drawn, vocabulary = cache.schema, rules.samples is not None, vocabulary_size(cache)
    return {
        "version": STATISTICS_VERSION,
        "store": {
            "path": str(cache.storage),
            "store_id": cache.record.store_id,
            "phase": cache.record.phase,
            "target_model": cache.manifest.get("target_model"),
            "dtype": schema.dtype.logical,
            "values": schema.values,
            "codec": schema.codec,
            "samples": schema.num_samples,
            "seq_length": schema.seq_length,
            "hidden_size": schema.hidden_size,
            "layer_ids": list(schema.layer_ids),
            "shards": schema.tokens.num_shards,
            "captured_shards": len(survey.captured),
            "nonfinite_samples": int((cache.status == 1).sum()) if cache.record.complete else None,
        },
        "read": {
            "samples": tally.samples,
            "samples_with_states": tally.captured,
            "drawn": drawn,
            "seed": rules.seed if drawn else None,
            "layers": list(survey.layers),
            "last_hidden_states": rules.last,
        },
        "lengths": summarise_lengths(cache),
        "supervision": summarise_supervision(cache),
        "sources": summarise_sources(cache),
        "vocabulary": {
            "size": vocabulary,
            "outside": tally.tokens.outside,
            "all": summarise_ids(tally.tokens.counts, vocabulary, decode),
            "supervised": summarise_ids(tally.tokens.supervised, vocabulary, decode),
        },
        **_summarise_states(survey, tally, rules.outlier_factor),
    }


def _summarise_states(survey: ShardSurvey, tally: ShardTally, factor: float) -> dict[str, JsonValue]:
    """Return the figures of the layers, of the last hidden states and of neighbours; empty before any is captured."""
    if tally.states is None or tally.neighbours is None:
        return {"layers": [], "last_hidden_states": None, "neighbours": []}
    ids, figures = survey.layers, [summarise_layer(states, factor) for states in tally.states]
    last: JsonValue = None
    if survey.last:
        of_last = figures[ids.index(survey.shared) if survey.shared in ids else -1]
        last = {"column": LAST, "same_objects_as_layer": survey.shared, **of_last}
    layers: list[JsonValue] = [
        {"layer_id": layer, "column": LAYERS, **found} for layer, found in zip(ids, figures, strict=False)
    ]
    neighbours: list[JsonValue] = [
        {"lower": lower, "upper": upper, "tokens": cosines.count, "cosine": spread(cosines)}
        for lower, upper, cosines in zip(ids[:-1], ids[1:], tally.neighbours, strict=True)
    ]
    return {"layers": layers, "last_hidden_states": last, "neighbours": neighbours}
