"""Several sources as one, their records taken in the order of a schedule."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.registry import nearest_of
from dspark_store.sources.schedules import (
    MAX_PARTS,
    check_weights,
    exhaustive_schedule,
    local_indices,
    normalised,
    weighted_schedule,
)
from dspark_store.sources.source import Sample, Source, SourceError

type ScheduleName = Literal["exhaustive", "megatron", "hyper_parallel"]
type ShortRule = Literal["error", "stop", "wrap"]

SCHEDULES = ("exhaustive", "megatron", "hyper_parallel")
SHORT_RULES = ("error", "stop", "wrap")
_PIECE_BITS = 20
_MAX_CURSOR = 2**62


@dataclass(frozen=True, slots=True)
class BlendPart:
    """One source of a blend. Its weight is None where the blend goes by lengths."""

    name: str
    source: Source
    weight: float | None = None


@dataclass(frozen=True, slots=True)
class PartShare:
    """What a blend takes of a part: of its `records`, `taken` in all, of which `repeated` were taken before."""

    name: str
    records: int
    taken: int

    @property
    def repeated(self) -> int:
        """How many of the records taken are not the first of their kind."""
        return max(0, self.taken - self.records)

    @property
    def left_out(self) -> int:
        """How many records are never taken."""
        return max(0, self.records - self.taken)

    def __str__(self) -> str:
        return f"part {self.name!r} has {self.records:,} records: {self.taken:,} taken, {self.repeated:,} of them again"


class Blend(Source):
    """Sources mixed record by record. The samples of a record stay together; a step whose record has none is passed.

    A cursor is the steps that are done, times 2^20, plus the samples taken of the step that has begun.

    Attributes:
        parts: in the order of their numbers.

    """

    def __init__(
        self,
        parts: Sequence[BlendPart],
        *,
        schedule: ScheduleName = "exhaustive",
        samples: int | None = None,
        on_short: ShortRule | None = None,
        max_samples: int | None = None,
    ) -> None:
        """Mix parts.

        Args:
            parts: those to be taken from, without the ones of weight 0.
            schedule: "exhaustive" takes every record once; the others go by weight, see `schedules`.
            samples: records to take by a weighted schedule; None for as many as there are until a part ends.
            on_short: what happens when a weighted schedule asks a part for more than it has: "error", "stop" there, or
                "wrap" to the part's beginning. None is "stop" where `samples` is None, else what the scheme's own
                project does: "error" for Megatron-LM's, "wrap" for hyper-parallel's.
            max_samples: take at most this many records in all.

        Raises:
            SourceError: a part has no records, a weight cannot be used, the options contradict each other, or a part is
                too short.

        """
        _check_options(schedule, samples, on_short, max_samples)
        _check_parts(parts, schedule)
        self.parts = tuple(parts)
        self._schedule, self._samples = schedule, samples
        by_default: ShortRule = "stop" if samples is None else "error" if schedule == "megatron" else "wrap"
        self._on_short = on_short or by_default
        self._lengths = [len(part.source) for part in parts]
        self._weights = None if parts[0].weight is None else normalised([part.weight or 0.0 for part in parts])
        self._sequence = self._scheduled()[:max_samples]
        self._first_origins = np.cumsum([0, *(len(part.source.origins()) for part in parts)]).tolist()
        if self._first_origins[-1] > MAX_PARTS:
            raise SourceError(f"a blend has {self._first_origins[-1]} parts in all; expected at most {MAX_PARTS}")
        twice = [name for name, count in Counter(self.origins()).items() if count > 1]
        if twice:
            raise SourceError(f"two parts of a blend are named {twice[0]!r}; give each its own name")

    def identity(self) -> dict[str, JsonValue]:
        """Return the schedule and what decides each part; names do not count."""
        weights: list[JsonValue] | None = None if self._weights is None else [*self._weights]
        return {
            "type": "blend",
            "schedule": self._schedule,
            "weights": weights,
            "records": len(self),
            "wraps": self._on_short == "wrap",
            "parts": [part.source.identity() for part in self.parts],
        }

    def __len__(self) -> int:
        """Return the records to take, of all parts together."""
        return len(self._sequence)

    def origins(self) -> tuple[str, ...]:
        """Return the names of the parts; those of a part that is a blend itself are `part/inner`."""
        return tuple(
            f"{part.name}/{inner}" if len(part.source.origins()) > 1 else part.name
            for part in self.parts
            for inner in part.source.origins()
        )

    def shares(self) -> tuple[PartShare, ...]:
        """Return what is taken of each part, and how much of it more than once."""
        taken = np.bincount(self._sequence, minlength=len(self.parts)).tolist()
        return tuple(
            PartShare(part.name, records, count)
            for part, records, count in zip(self.parts, self._lengths, taken, strict=True)
        )

    def lengths(self) -> NDArray[np.int64] | None:
        """Return the tokens of each record, shape (len,), where every part knows its own; else None."""
        lengths = np.empty(len(self), np.int64)
        for number, part in enumerate(self.parts):
            known = part.source.lengths()
            if known is None:
                return None
            places = self._sequence == number
            lengths[places] = known[self._records[places]]
        return lengths

    def read(self, cursor: int = 0) -> Iterator[Sample]:
        """Yield the samples from a cursor on; ValueError when it is outside the blend."""
        step, done = divmod(cursor, 1 << _PIECE_BITS)
        if cursor < 0 or step > len(self) or (step == len(self) and done):
            raise ValueError(f"cursor is {cursor}; expected 0 to {len(self) << _PIECE_BITS}")
        return self._read(step, done)

    def record_of(self, cursor: int) -> int:
        """Return the steps that are done at a cursor."""
        return min(cursor >> _PIECE_BITS, len(self))

    def sample(self, record: int) -> Sample:
        """Return the first sample of the record of a step; IndexError when there is no such step."""
        part, own = self.part_of(record)
        return self._of_blend(self.parts[part].source.sample(own), part, (record + 1) << _PIECE_BITS)

    def part_of(self, record: int) -> tuple[int, int]:
        """Return the part that a step takes from, and the record it takes; IndexError when there is no such step."""
        if not 0 <= record < len(self):
            raise IndexError(f"record {record} is outside the blend's {len(self)} records")
        return int(self._sequence[record]), int(self._records[record])

    @cached_property
    def _records(self) -> NDArray[np.int64]:
        """(len,) int64: the record of its part that each step takes."""
        return local_indices(self._sequence) % np.array(self._lengths, np.int64)[self._sequence]

    def _read(self, step: int, done: int) -> Iterator[Sample]:
        taken = np.bincount(self._sequence[:step], minlength=len(self.parts)).tolist()
        readers = [_PartReader(part.source) for part in self.parts]
        for number in range(step, len(self)):
            part = int(self._sequence[number])
            before, done = done, 0
            for piece, (sample, last) in enumerate(readers[part].samples_of(taken[part]), start=1):
                if piece >> _PIECE_BITS:
                    name = self.parts[part].name
                    raise SourceError(f"a record of part {name!r} has more than {1 << _PIECE_BITS} samples")
                if piece > before:
                    cursor = (number + 1) << _PIECE_BITS if last else (number << _PIECE_BITS) + piece
                    yield self._of_blend(sample, part, cursor)
            taken[part] += 1

    def _of_blend(self, sample: Sample, part: int, cursor: int) -> Sample:
        return replace(sample, cursor=cursor, origin=self._first_origins[part] + sample.origin)

    def _scheduled(self) -> NDArray[np.uint16]:
        if self._schedule == "exhaustive":
            return exhaustive_schedule(self._lengths, self._weights)
        # Some part has ended by the time that one record more than there are was asked for.
        size = sum(self._lengths) + 1 if self._samples is None else self._samples
        limits = None if self._on_short == "wrap" else self._lengths
        sequence = weighted_schedule(self._schedule, self._weights or [], size, limits)
        if self._on_short == "error" and len(sequence) < size:
            taken = np.bincount(sequence, minlength=len(self.parts)).tolist()
            counts = zip(self.parts, self._lengths, taken, strict=True)
            used_up = ", ".join(f"{part.name!r} has {records}" for part, records, count in counts if count == records)
            raise SourceError(
                f"a blend of {size} samples asks a part for more than it has after {len(sequence)}: {used_up}; "
                "take fewer samples, or say on_short: stop or wrap"
            )
        return sequence


class _PartReader:
    """Gives a part's samples record by record, over and over."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._samples: Iterator[Sample] = iter(())
        self._lap = -1
        self._held: Sample | None = None

    def samples_of(self, count: int) -> Iterator[tuple[Sample, bool]]:
        """Yield the samples of the next record, when `count` were taken before, and whether each ends its record.

        Records must be asked for in order.
        """
        lap, record = divmod(count, len(self._source))
        if lap != self._lap:
            self._samples, self._lap, self._held = self._source.read(_start_of(self._source, record)), lap, None
        while True:
            sample = next(self._samples, None) if self._held is None else self._held
            self._held = None
            if sample is None:
                return
            if self._source.record_of(sample.cursor - 1) > record:
                self._held = sample
                return
            last = self._source.record_of(sample.cursor) > record
            yield sample, last
            if last:
                return


def _start_of(source: Source, record: int) -> int:
    """Return the least cursor at which this many records are passed."""
    if record == 0 or source.record_of(record - 1) < record == source.record_of(record):
        return record  # one sample per record, as most sources have
    return bisect_left(range(_MAX_CURSOR), record, key=source.record_of)


def _check_parts(parts: Sequence[BlendPart], schedule: ScheduleName) -> None:
    if not parts:
        raise SourceError("a blend has no sources; expected at least one")
    if len(parts) > MAX_PARTS:
        raise SourceError(f"a blend has {len(parts)} parts; expected at most {MAX_PARTS}")
    check_weights([part.weight for part in parts])
    if schedule != "exhaustive" and parts[0].weight is None:
        raise SourceError(f"schedule {schedule!r} of a blend goes by weight, and its parts have none")
    idle = [part.name for part in parts if part.weight == 0]
    if idle:
        raise SourceError(f"part {idle[0]!r} of a blend has weight 0; leave it out")
    empty = [part.name for part in parts if not len(part.source)]
    if empty:
        raise SourceError(f"{', '.join(map(repr, empty))} of a blend: no records; expected at least one in each part")


def _check_options(schedule: str, samples: int | None, on_short: str | None, max_samples: int | None) -> None:
    rule = SHORT_RULES[0] if on_short is None else on_short
    for what, chosen, known in (("schedule", schedule, SCHEDULES), ("on_short", rule, SHORT_RULES)):
        if chosen not in known:
            raise SourceError(f"{what} {chosen!r} of a blend is unknown; {nearest_of(str(chosen), known)}")
    numbers: dict[str, object] = {"samples": samples, "max_samples": max_samples}  # as users wrote them
    for name, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise SourceError(f"{name} of a blend is {value!r}; expected a whole number of at least 1, or none")
    if schedule == "exhaustive" and (samples is not None or on_short is not None):
        name = "samples" if samples is not None else "on_short"
        raise SourceError(f"an exhaustive blend takes every record once and has no {name}; choose another schedule")
    if schedule != "exhaustive" and samples is None and on_short not in (None, "stop"):
        raise SourceError(f"a blend with on_short {on_short!r} never ends; say how many samples to take")
