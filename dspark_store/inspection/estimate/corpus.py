"""What a store is made from, or holds, as far as an estimate goes: every sample's length, and some samples' tokens."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

import numpy as np

from dspark_store.inspection.samples import SampleTokens, read_tokens
from dspark_store.precompute.tokenise import no_samples
from dspark_store.progress import start_progress
from dspark_store.readers.cache import Cache
from dspark_store.sources.source import Source

_SEED = 0


@dataclass(frozen=True, slots=True)
class Corpus:
    """N samples: ``lengths`` (N,) int64 and, where somebody has counted them, ``supervised`` (N,) int64.

    ``rows`` are some of the samples, chosen at random and in order, the same ones every time.
    """

    lengths: np.ndarray
    supervised: np.ndarray | None
    rows: tuple[SampleTokens, ...]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Valid tokens of all samples."""
        return int(self.lengths.sum())


def count_source(source: Source, seq_length: int, rows: int, *, all_kept: bool) -> Corpus:
    """Count what a source gives, and take ``rows`` of it at random.

    A source that knows its lengths is not read through, if ``all_kept`` says that no sample of it is left out for want
    of supervision, and none of its records is cut into several samples. SourceError when it has no samples.
    """
    lengths = source.lengths() if all_kept else None
    if lengths is not None and lengths.max(initial=0) <= seq_length:
        records = np.flatnonzero(lengths)
        if not len(records):
            raise no_samples(source)
        samples = {number: source.sample(int(records[number])) for number in chosen_numbers(len(records), rows)}
        taken = (SampleTokens(number, sample.input_ids, sample.loss_mask) for number, sample in samples.items())
        return Corpus(lengths[records], None, tuple(taken))
    counts, supervised, kept, draw = array("q"), array("q"), list[SampleTokens](), random.Random(_SEED)
    with start_progress("tokenise", len(source), "rows") as progress:
        for number, sample in enumerate(source.read()):
            counts.append(len(sample.input_ids))
            supervised.append(int(sample.loss_mask.sum()))
            place = number if number < rows else draw.randrange(number + 1)  # Vitter's algorithm R
            if place < rows:
                kept[place : place + 1] = [SampleTokens(number, sample.input_ids, sample.loss_mask)]
            progress.reach(source.record_of(sample.cursor), lambda: f"{len(counts):,} samples")
        progress.reach(len(source), lambda: "")
    if not counts:
        raise no_samples(source)
    in_order = sorted(kept, key=lambda row: row.number)
    return Corpus(np.array(counts, np.int64), np.array(supervised, np.int64), tuple(in_order))


def count_store(cache: Cache, rows: int) -> Corpus:
    """Count a store's samples, and take ``rows`` of those whose states can be read, or of all where none can.

    ValueError when the store is still in its token phase.
    """
    if cache.record.phase == "tokens":
        raise ValueError(f"store at {cache.storage} is still in its token phase: its lengths are not known yet")
    grid = cache.schema.tokens
    readable = [sample for shard in cache.index.committed() for sample in grid.rows(shard)]
    samples = readable or range(len(cache))
    taken = tuple(read_tokens(cache, samples[place]) for place in chosen_numbers(len(samples), rows))
    return Corpus(cache.lengths.astype(np.int64), cache.supervised.astype(np.int64), taken)


def chosen_numbers(count: int, wanted: int) -> list[int]:
    """Return ``wanted`` of the numbers below ``count``, or all of them, in order; the same ones every time."""
    return sorted(random.Random(_SEED).sample(range(count), min(wanted, count)))
