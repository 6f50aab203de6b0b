"""The tokens of a store beside those that its source gives today."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import accumulate, groupby, zip_longest

import numpy as np

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.ledger import token_ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import NO_RECORD
from dspark_store.format.storage import Storage
from dspark_store.format.token_shards import read_token_shard, sample_digest
from dspark_store.inspection.samples import SampleTokens
from dspark_store.sources.identity import comparable
from dspark_store.sources.source import Sample, Source

_SAME_ROWS = frozenset({"on_bad_row", "template_date"})
"""Options that leave the rows what they are: the one decides about rows that a finished store has not."""


@dataclass(frozen=True, slots=True)
class TokenPair:
    """A sample as it is stored and as its row gives it today. One of them is None where it has no counterpart."""

    stored: SampleTokens | None
    today: Sample | None

    @property
    def same_ids(self) -> bool:
        """Whether both are there and have the same ids."""
        if self.stored is None or self.today is None:
            return False
        return np.array_equal(self.stored.input_ids, self.today.input_ids)

    @property
    def difference(self) -> str:
        """What of them differs, in words; nothing where they are equal."""
        if self.stored is None:
            return "not in the store"
        if self.today is None:
            return "not there today"
        if not self.same_ids:
            return "other ids"
        return "" if np.array_equal(self.stored.loss_mask, self.today.loss_mask) else "the same ids, another mask"

    @property
    def first(self) -> int:
        """The first token that differs; the shorter one's end where only their lengths do."""
        if self.stored is None or self.today is None:
            return 0
        shorter = min(len(self.stored.input_ids), len(self.today.input_ids))
        pairs = ((self.stored.input_ids, self.today.input_ids), (self.stored.loss_mask, self.today.loss_mask))
        found = [np.flatnonzero(one[:shorter] != other[:shorter]) for one, other in pairs]
        return min((int(places[0]) for places in found if len(places)), default=shorter)


def pair_tokens(storage: Storage, record: StoreRecord, source: Source) -> Iterator[TokenPair]:
    """Yield the samples of a store, each beside what its row gives today, in order.

    A store in its token phase has them up to its first hole. A row that gives another number of samples today shifts
    no other shard's. DamagedStoreError where tokens cannot be read, SourceError where a row cannot be used today.
    """
    ledger = token_ledger(storage)
    shards = [shard for number, shard in enumerate(ledger.committed()) if number == shard]
    rows_of = [ledger.row(shard) for shard in shards]
    cursors, counts = [int(row[2, 0]) for row in rows_of], [int(row[2, 1]) for row in rows_of]
    by_cursor = NO_RECORD not in cursors  # a copy with other shards does not know them all
    ends = cursors if by_cursor else list(accumulate(counts))
    settled = record.phase != "tokens"

    def shard_of(numbered: tuple[int, Sample]) -> int:
        shard = bisect_left(ends, numbered[1].cursor if by_cursor else numbered[0])
        return min(shard, len(ends) - 1) if settled else shard

    groups = groupby(enumerate(source.read(), 1), key=shard_of)
    following = next(groups, None)
    first = 0
    for shard, count in zip(shards, counts, strict=True):
        today: list[Sample] = []
        if following is not None and following[0] == shard:
            today = [sample for _, sample in following[1]]
            following = next(groups, None)
        rows = read_token_shard(storage, record, shard)
        stored = [
            SampleTokens(first + row, ids, mask)
            for row, (ids, mask) in enumerate(zip(rows.ids, rows.masks, strict=True))
        ]
        yield from _aligned(stored, today)
        first += count


def _aligned(stored: Sequence[SampleTokens], today: Sequence[Sample]) -> Iterator[TokenPair]:
    before, now = _digests(stored), _digests(today)
    for _, start, stop, others, end in SequenceMatcher(None, before, now, autojunk=False).get_opcodes():
        for one, other in zip_longest(stored[start:stop], today[others:end]):
            yield TokenPair(one, other)


def _digests(samples: Sequence[SampleTokens] | Sequence[Sample]) -> list[bytes]:
    return [sample_digest(sample.input_ids, sample.loss_mask) for sample in samples]


def other_fields(stored: JsonValue, today: JsonValue, inside: str = "") -> list[str]:
    """Return in what two sources differ that decides which rows there are: the fields, and what they are in each."""
    one, other = comparable(stored, today)
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return [] if one == other else [f"{inside}: store {one!r}, here {other!r}"]
    found: list[str] = []
    for name in sorted((one.keys() | other.keys()) - _SAME_ROWS):
        mine, theirs = one.get(name), other.get(name)
        if name == "parts" and isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
            for number, parts in enumerate(zip(mine, theirs, strict=True)):
                found += other_fields(*parts, f"part {number} of the blend, ")
        elif mine != theirs:
            found.append(f"{inside}{name}: store {mine!r}, here {theirs!r}")
    return found


def recorded_options(manifest: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the options of a store's source; of a blend, those that all of its parts have alike."""
    leaves = list(_leaves(manifest.get("source")))
    first = leaves[0] if leaves else {}
    alike = {name: value for name, value in first.items() if all(leaf.get(name) == value for leaf in leaves)}
    job = {"split": manifest.get("train_split"), "shuffle_seed": manifest.get("shuffle_seed")}
    source = manifest.get("source")
    if isinstance(source, Mapping) and source.get("type") == "blend":
        job["max_samples"] = source.get("records")
    return {**alike, **job}


def _leaves(source: JsonValue) -> Iterator[Mapping[str, JsonValue]]:
    if isinstance(source, Mapping):
        parts = source.get("parts")
        if source.get("type") == "blend" and isinstance(parts, list):
            for part in parts:
                yield from _leaves(part)
        else:
            yield source
