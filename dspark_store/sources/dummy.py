"""Samples made from nothing, for trying things."""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.registry import SourceContext
from dspark_store.sources.row_order import select_rows
from dspark_store.sources.source import Sample, Source, SourceError

DEFAULT_SAMPLES, DEFAULT_VOCAB = 1000, 32000
_LENGTH_TAG, _TOKENS_TAG = 0, 1
_WORD = 2**32


@dataclass(frozen=True, kw_only=True)
class DummySource(Source):
    """Random tokens of random lengths, all supervised. A record is one sample.

    Everything follows from the seed and the record's number: SHAKE-128 over both, as two 64-bit words, gives 32-bit
    numbers `x`, and one below `n` is `x * n >> 32`. So samples are the same with every library and machine, and the
    streams of two seeds have nothing in common.

    Attributes:
        samples: samples before `split`, at least 1.
        min_length: fewest tokens of a sample, at least 1.
        max_length: most tokens of a sample.
        vocab: ids are below it; 1 to 2^31.
        seed: 0 to 2^64 - 1.
        split: None or `name[a:b]`, a slice of the samples.
        max_samples: take at most this many, after `split`.

    """

    samples: int
    min_length: int
    max_length: int
    vocab: int
    seed: int
    split: str | None = None
    max_samples: int | None = None

    def __post_init__(self) -> None:
        """Check the values; SourceError names the number that is out of its range, or the split that takes nothing."""
        _check("samples", self.samples, 1, 2**63 - 1)
        _check("max_length", self.max_length, 1, 2**31 - 1)
        _check("min_length", self.min_length, 1, self.max_length)
        _check("vocab", self.vocab, 1, 2**31)
        _check("seed", self.seed, 0, 2**64 - 1)
        len(self._numbers)

    @cached_property
    def _numbers(self) -> Sequence[int]:
        return select_rows(self.samples, split=self.split, shuffle_seed=None, max_samples=self.max_samples)

    def identity(self) -> dict[str, JsonValue]:
        """Return what decides the samples."""
        return {"type": "dummy", **{option.name: getattr(self, option.name) for option in fields(self)}}

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._numbers)

    def lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each sample, shape (len,)."""
        return np.fromiter(map(self._length, self._numbers), np.int64, len(self))

    def read(self, cursor: int = 0) -> Iterator[Sample]:
        """Yield the samples from record `cursor` on; ValueError when it is outside [0, len]."""
        if not 0 <= cursor <= len(self):
            raise ValueError(f"cursor is {cursor}; expected 0 to {len(self)}, the number of records")
        return map(self.sample, range(cursor, len(self)))

    def record_of(self, cursor: int) -> int:
        """Return the records passed at a cursor, which is their number."""
        return min(cursor, len(self))

    def sample(self, record: int) -> Sample:
        """Return one sample; IndexError when there is none of this number."""
        if not 0 <= record < len(self):
            raise IndexError(f"record {record} is outside the source's {len(self)} records")
        number = self._numbers[record]
        length = self._length(number)
        ids = self._draw(_TOKENS_TAG, number, length, self.vocab).astype(np.int32)
        return Sample(ids, np.ones(length, np.uint8), cursor=record + 1)

    def _length(self, number: int) -> int:
        if self.min_length == self.max_length:
            return self.max_length
        return self.min_length + int(self._draw(_LENGTH_TAG, number, 1, self.max_length - self.min_length + 1).item())

    def _draw(self, tag: int, number: int, count: int, below: int) -> NDArray[np.uint64]:
        stream = hashlib.shake_128(struct.pack("<QQB", self.seed, number, tag)).digest(4 * count)
        numbers: NDArray[np.uint64] = np.frombuffer(stream, "<u4").astype(np.uint64) * np.uint64(below) // _WORD
        return numbers


def build_dummy(
    context: SourceContext,
    *,
    samples: int | None = None,
    min_length: int | None = None,
    max_length: int | None = None,
    vocab: int | None = None,
    seed: int | None = None,
    split: str | None = None,
) -> DummySource:
    """Build a dummy source.

    Unless given, there are 1000 samples, each as long as the job's samples may be, of ids of the target's vocabulary,
    or below 32000 where it is not known, with the job's seed and split. Where `max_length` is given, lengths begin at
    1. They are not shuffled: one order of random samples is as good as another.
    """
    if samples is None:
        samples = DEFAULT_SAMPLES if context.num_samples is None else context.num_samples
    lowest = context.seq_length if max_length is None else 1
    longest = context.seq_length if max_length is None else max_length
    _check("max_length", longest, 1, context.seq_length)
    return DummySource(
        samples=samples,
        min_length=lowest if min_length is None else min_length,
        max_length=longest,
        vocab=(context.vocab_size or DEFAULT_VOCAB) if vocab is None else vocab,
        seed=context.seed if seed is None else seed,
        split=context.split if split is None else split,
        max_samples=context.max_samples,
    )


def _check(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise SourceError(f"{name} of a dummy source is {value!r}; expected a whole number from {least} to {most}")
