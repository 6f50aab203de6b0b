"""How many samples a store has and how long they are, from its index or from its first token shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import batched

import numpy as np

from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.ledger import Ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import SOURCE_CURSOR, STATE_LEDGER, TOKEN_LEDGER, TOKEN_OBJECTS
from dspark_store.format.storage import LocalStorage, Storage
from dspark_store.format.token_shards import read_token_shard
from dspark_store.readers.index import StoreIndex

_MOST_BINS = 10
MOST_ROWS = 4096
"""So many rows of a ledger are read at most: each is a file, and a million of them would take minutes."""
_ROWS_A_TASK, _THREADS = 64, 16
_SHARDS_AT_LEAST = 1 << 20
"""While tokens are written, rows of shards far beyond the number of rows are no part of the store."""
TOKEN_SHARDS_READ = 4
"""So many token shards of a store in its token phase are read to tell how long its samples are."""


@dataclass(frozen=True, slots=True)
class LengthBin:
    """Samples of ``first`` to ``last`` tokens, both included."""

    first: int
    last: int
    samples: int


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """Lengths in tokens. ``at_limit`` samples are as long as the store allows; some may be cut."""

    shortest: int
    mean: float
    median: int
    longest: int
    at_limit: int
    histogram: tuple[LengthBin, ...]


def summarise_lengths(lengths: np.ndarray, limit: int) -> LengthSummary | None:
    """Describe the lengths of some samples, (n,) of 0 to ``limit`` tokens; None when there are none."""
    if not len(lengths):
        return None
    return LengthSummary(
        shortest=int(lengths.min()),
        mean=float(lengths.mean()),
        median=int(np.percentile(lengths, 50, method="lower")),
        longest=int(lengths.max()),
        at_limit=int((lengths == limit).sum()),
        histogram=length_bins(lengths),
    )


def length_bins(lengths: np.ndarray) -> tuple[LengthBin, ...]:
    """Count lengths in at most ten bins of one round width, from 0 to the longest; every length is in one."""
    longest = int(lengths.max(initial=0))
    width = next(width for width in _round_numbers() if longest // width < _MOST_BINS)
    counts = np.bincount(lengths // width, minlength=longest // width + 1).tolist()
    return tuple(
        LengthBin(number * width, min(longest, (number + 1) * width - 1), count) for number, count in enumerate(counts)
    )


def _round_numbers() -> Iterator[int]:
    power = 1
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10


@dataclass(frozen=True, slots=True)
class LedgerRows:
    """Rows of one ledger: ``rows``, (n, objects, 2) uint64, are those of ``shards``, ascending.

    ``committed`` are all shards that it has, of which those are the ones that were read.
    """

    committed: Sequence[int]
    shards: Sequence[int]
    rows: np.ndarray


def read_ledgers(
    storage: Storage, record: StoreRecord, index: StoreIndex, damage: list[str]
) -> tuple[LedgerRows, LedgerRows]:
    """Return the rows of the token ledger and of the state ledger; those of a complete store are in its index.

    At most `MOST_ROWS` of a growing store's are read, evenly spread. For rows that are not as written a line is added
    to ``damage``.
    """
    objects = read_or_note(lambda: index.objects, damage) if record.complete else None
    if objects is not None:
        shards, tokens = range(len(objects)), len(TOKEN_OBJECTS)
        return LedgerRows(shards, shards, objects[:, :tokens]), LedgerRows(shards, shards, objects[:, tokens:])
    # States are committed after their tokens: so none is found whose tokens were not there when these were listed.
    states = _read_ledger(storage, record, STATE_LEDGER, len(record.schema.state_objects), damage)
    return _read_ledger(storage, record, TOKEN_LEDGER, len(TOKEN_OBJECTS), damage), states


def _read_ledger(storage: Storage, record: StoreRecord, path: str, objects: int, damage: list[str]) -> LedgerRows:
    ledger = Ledger(storage, path, objects)
    found_there = ledger.committed()
    most = max(_SHARDS_AT_LEAST, 2 * len(found_there))
    if record.phase != "tokens":
        most = record.schema.tokens.num_shards
    committed = [shard for shard in found_there if shard < most]
    if record.phase == "tokens" and len(committed) < len(found_there):
        damage.append(f"{path} has a row of shard {found_there[-1]}, where {len(found_there):,} shards are there")
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ledger") as pool:
        tasks = batched(spread(committed, MOST_ROWS), _ROWS_A_TASK)
        parts = list(pool.map(lambda shards: _read_rows(ledger, shards), tasks))
    found = [row for rows, _ in parts for row in rows]
    bad = [line for _, lines in parts for line in lines]
    if bad:
        damage.append(f"{len(bad)} of the rows of {path} cannot be read: {bad[0]}")
    rows = np.stack([row for _, row in found]) if found else np.empty((0, objects, 2), np.uint64)
    return LedgerRows(committed, [shard for shard, _ in found], rows)


def _read_rows(ledger: Ledger, shards: Sequence[int]) -> tuple[list[tuple[int, np.ndarray]], list[str]]:
    found, damage = [], []
    for shard in shards:
        try:
            found.append((shard, ledger.row(shard)))
        except FileNotFoundError:  # its writer has taken the shard back since it was listed
            continue
        except (DamagedStoreError, OSError) as error:
            damage.append(str(error))
    return found, damage


def spread(shards: Sequence[int], most: int) -> list[int]:
    """Return at most ``most`` of some shards, evenly spread, the first and the last among them."""
    if len(shards) <= most:
        return list(shards)
    return [shards[place] for place in np.linspace(0, len(shards) - 1, most).round().astype(int).tolist()]


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
class SampleSurvey:
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


def survey_index(index: StoreIndex, record: StoreRecord, damage: list[str]) -> SampleSurvey:
    """SampleSurvey a store whose tokens are final."""
    grid = record.schema.tokens
    samples = np.full(grid.num_shards, grid.shard_size, np.int64)
    if len(samples):
        samples[-1] = len(grid.rows(grid.num_shards - 1))
    lengths = read_or_note(lambda: index.length, damage)
    supervised = read_or_note(lambda: index.supervised, damage)
    tokens = None if lengths is None else shard_sums(lengths, grid.shard_size)
    return SampleSurvey(grid.num_samples, samples, tokens, lengths, supervised)


def survey_shards(storage: LocalStorage, record: StoreRecord, ledger: LedgerRows, damage: list[str]) -> SampleSurvey:
    """SampleSurvey a store in its token phase: a few of its committed shards are read, and speak for all.

    Shards whose ledger row was not read are taken to be full; only the last one of a store may be short.
    """
    samples = np.zeros(max(ledger.committed, default=-1) + 1, np.int64)
    samples[list(ledger.committed)] = record.schema.shard_size
    for shard, row in zip(ledger.shards, ledger.rows, strict=True):
        samples[shard] = min(int(row[TOKEN_OBJECTS.index(SOURCE_CURSOR), 1]), record.schema.shard_size)
    read = [
        read_or_note(partial(read_token_shard, storage, record, shard), damage)
        for shard in spread(ledger.shards, TOKEN_SHARDS_READ)
    ]
    masks = [mask for rows in read if rows is not None for mask in rows.masks]
    lengths = np.array([len(mask) for mask in masks], np.int64)
    supervised = np.array([int(mask.sum()) for mask in masks], np.int64)
    count = int(samples.sum())
    if not masks and count:
        return SampleSurvey(count, samples, None, None, None)
    tokens = (samples * (lengths.mean() if masks else 0.0)).round().astype(np.int64)
    if len(lengths) == count:
        tokens = _exact(samples, lengths)
    return SampleSurvey(count, samples, tokens, lengths, supervised)


def source_shares(
    names: Sequence[str], source: np.ndarray, lengths: np.ndarray, supervised: np.ndarray
) -> list[SourceShare]:
    """Return what each part of a blend has, by the number of each sample's source, (N,), its length and supervision."""
    sums = [np.bincount(source, values, len(names)).astype(np.int64) for values in (None, lengths, supervised)]
    total = max(1, int(lengths.sum()))
    return [
        SourceShare(name, samples, tokens, of_supervised, tokens / total)
        for name, samples, tokens, of_supervised in zip(names, *(column.tolist() for column in sums), strict=True)
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


def read_or_note[Value](read: Callable[[], Value], damage: list[str]) -> Value | None:
    """Return what ``read`` returns; None, with a line in ``damage``, for something that is not as written."""
    try:
        return read()
    except (DamagedStoreError, OSError) as error:
        if str(error) not in damage:  # two readings may stand on one array
            damage.append(str(error))
        return None
