"""What is known of a store's samples, however far it is: from its index, or from its first token shards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import SOURCE_CURSOR, TOKEN_OBJECTS
from dspark_store.format.storage import LocalStorage
from dspark_store.format.token_shards import read_token_shard
from dspark_store.inspection.damage import told
from dspark_store.inspection.summary.ledger_rows import LedgerRows, spread
from dspark_store.inspection.summary.length_histogram import LengthSummary, summarise_lengths
from dspark_store.readers.index import StoreIndex

TOKEN_SHARDS_READ = 4
"""So many token shards of a store in its token phase are read to tell how long its samples are."""


@dataclass(frozen=True, slots=True)
class SampleSummary:
    """The samples of a store, those so far while it is in its token phase.

    Lengths are those of ``counted`` samples; ``tokens`` and the counts of supervision are exact where that is all of
    them, else extrapolated, and None where no lengths could be read. ``nonfinite`` samples have a state that is not
    finite; that is known of a complete store only.
    """

    count: int
    counted: int
    tokens: int | None
    supervised: int | None
    unsupervised_samples: int | None
    nonfinite: int | None
    lengths: LengthSummary | None


@dataclass(frozen=True, slots=True)
class SourceShare:
    """A part of the blend that a store was made from. ``token_share`` is its share of all tokens, 0 to 1."""

    name: str
    samples: int
    tokens: int
    supervised: int
    token_share: float


@dataclass(frozen=True, slots=True)
class Survey:
    """Samples by shard, (shards,), and their tokens, (shards,), extrapolated if ``exact`` is false.

    ``lengths`` and ``supervised``, (n,), are of samples that were looked at. Arrays are None where they are unknown.
    """

    samples: int
    shard_samples: np.ndarray
    shard_tokens: np.ndarray | None
    lengths: np.ndarray | None
    supervised: np.ndarray | None

    def summary(self, limit: int, nonfinite: int | None) -> SampleSummary:
        """Describe the samples; ``limit`` is the most tokens that one may have."""
        counted, supervised = 0 if self.lengths is None else len(self.lengths), self.supervised
        factor = 1.0 if supervised is None else self.samples / max(1, len(supervised))
        return SampleSummary(
            self.samples,
            counted,
            None if self.shard_tokens is None else int(self.shard_tokens.sum()),
            None if supervised is None else round(int(supervised.sum()) * factor),
            None if supervised is None else round(int((supervised == 0).sum()) * factor),
            nonfinite,
            None if self.lengths is None else summarise_lengths(self.lengths, limit),
        )


def survey_index(index: StoreIndex, record: StoreRecord, damage: list[str]) -> Survey:
    """Survey a store whose tokens are final."""
    grid = record.schema.tokens
    samples = np.full(grid.num_shards, grid.shard_size, np.int64)
    if len(samples):
        samples[-1] = len(grid.rows(grid.num_shards - 1))
    lengths = told(lambda: index.length, damage)
    supervised = told(lambda: index.supervised, damage)
    tokens = None if lengths is None else shard_sums(lengths, grid.shard_size)
    return Survey(grid.num_samples, samples, tokens, lengths, supervised)


def survey_shards(storage: LocalStorage, record: StoreRecord, ledger: LedgerRows, damage: list[str]) -> Survey:
    """Survey a store in its token phase: a few of its committed shards are read, and speak for all.

    Shards whose ledger row was not read are taken to be full; only the last one of a store may be short.
    """
    samples = np.zeros(max(ledger.committed, default=-1) + 1, np.int64)
    samples[list(ledger.committed)] = record.schema.shard_size
    for shard, row in zip(ledger.shards, ledger.rows, strict=True):
        samples[shard] = min(int(row[TOKEN_OBJECTS.index(SOURCE_CURSOR), 1]), record.schema.shard_size)
    read = [
        told(partial(read_token_shard, storage, record, shard), damage)
        for shard in spread(ledger.shards, TOKEN_SHARDS_READ)
    ]
    masks = [mask for rows in read if rows is not None for mask in rows.masks]
    lengths = np.array([len(mask) for mask in masks], np.int64)
    supervised = np.array([int(mask.sum()) for mask in masks], np.int64)
    count = int(samples.sum())
    if not masks and count:
        return Survey(count, samples, None, None, None)
    tokens = (samples * (lengths.mean() if masks else 0.0)).round().astype(np.int64)
    if len(lengths) == count:
        tokens = _exact(samples, lengths)
    return Survey(count, samples, tokens, lengths, supervised)


def source_shares(index: StoreIndex, record: StoreRecord, survey: Survey, damage: list[str]) -> list[SourceShare]:
    """Return what each part of a blend has in a store whose tokens are final; nothing for a store of one source."""
    names = record.schema.sources
    source = told(lambda: index.source, damage) if names else None
    if source is None or survey.lengths is None or survey.supervised is None:
        return []
    samples = np.bincount(source, minlength=len(names)).tolist()
    tokens = np.bincount(source, survey.lengths, len(names)).astype(np.int64).tolist()
    supervised = np.bincount(source, survey.supervised, len(names)).astype(np.int64).tolist()
    total = max(1, sum(tokens))
    return [
        SourceShare(name, of_samples, of_tokens, of_supervised, of_tokens / total)
        for name, of_samples, of_tokens, of_supervised in zip(names, samples, tokens, supervised, strict=True)
    ]


def shard_sums(values: np.ndarray, shard_size: int) -> np.ndarray:
    """Return the sum of a value of every sample over each shard, int64."""
    starts = np.arange(0, len(values), shard_size)
    if not len(starts):
        return np.zeros(0, np.int64)
    sums: np.ndarray = np.add.reduceat(values, starts, dtype=np.int64)
    return sums


def _exact(samples: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return each shard's tokens, where the lengths of all samples were read, in order."""
    ends = np.cumsum(samples)
    totals = np.concatenate([[0], np.cumsum(lengths)])
    exact: np.ndarray = totals[ends] - totals[ends - samples]
    return exact
