"""Phase 1: the source is read and tokenised once, streaming, into committed token shards; what became of its rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.ledger import state_ledger, token_ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.objects import Expected, open_object
from dspark_store.format.storage import Storage
from dspark_store.format.token_shards import TokenRows
from dspark_store.precompute.undo import UnsupervisedError
from dspark_store.progress import start_progress
from dspark_store.sources.blend import Blend
from dspark_store.sources.source import Reporting, Resuming, Sample, Source, SourceError, SourceReport
from dspark_store.text import say
from dspark_store.writers.publish import settle_tokens
from dspark_store.writers.tokens import write_token_shard

_log = logging.getLogger(__name__)


def tokenise(
    storage: Storage,
    record: StoreRecord,
    source: Source,
    check: Callable[[], None] = lambda: None,
    on_sample: Callable[[], None] = lambda: None,
) -> StoreRecord:
    """Write the token shards that the store lacks, then settle N and enter the states phase.

    ``check`` is called after every shard, ``on_sample`` after every sample that the source gives; both may raise to
    stop.

    Every ledger row holds the cursor into the source after its shard, so a killed phase goes on where it was, and a
    hole is filled by reading just its records.
    """
    ledger = token_ledger(storage)
    committed = set(ledger.committed())
    last = max(committed, default=-1)
    with start_progress("tokenise", len(source), "rows") as progress:
        shard, cursor, given, tokens, passed, ended = 0, 0, 0, 0, 0, False
        samples: Iterator[Sample] | None = None
        while not ended:
            if shard in committed:
                count, cursor, samples = int(ledger.row(shard)[2, 1]), int(ledger.row(shard)[2, 0]), None
            else:
                samples = _calling(on_sample, _read_on(source, cursor, given)) if samples is None else samples
                taken = list(islice(samples, record.schema.shard_size))
                count = len(taken)
                if taken:
                    cursor, rows = taken[-1].cursor, _rows(taken)
                    _refuse_other_tokens(storage, record, shard, rows)
                    write_token_shard(storage, record, shard, rows, cursor)
                    tokens += sum(len(sample.input_ids) for sample in taken)
            ended = count < record.schema.shard_size
            if ended and shard < last:
                raise SourceError(
                    f"the source ended at record {source.record_of(cursor)} of {len(source)}: it changed while it was "
                    "read"
                )
            progress.advance(source.record_of(cursor) - passed, f"{tokens:,} new tokens")
            passed = source.record_of(cursor)
            shard, given = shard + (count > 0), given + count
            check()
    if shard == 0:
        raise no_samples(source)
    return settle_tokens(storage, record)


def _calling(on_sample: Callable[[], None], samples: Iterator[Sample]) -> Iterator[Sample]:
    for sample in samples:
        on_sample()
        yield sample


def _read_on(source: Source, cursor: int, given: int) -> Iterator[Sample]:
    """Return the samples from a cursor on, before which the source has given so many."""
    if isinstance(source, Resuming):
        source.resume(cursor, given)
    return source.read(cursor)


def _refuse_other_tokens(storage: Storage, record: StoreRecord, shard: int, rows: TokenRows) -> None:
    """Refuse tokens for a shard whose states were captured from others: both are then of no use to each other.

    A repaired store may have states before it has their tokens again.
    """
    if not storage.exists(state_ledger(storage, record.schema).key(shard)):
        return
    last = record.schema.state_objects[-1]
    expected = Expected(record.store_id, last.place(shard))
    stored = open_object(storage, last.key(shard), record.schema.states, expected)
    stored.reader.close()
    if stored.tail.label.tokens != rows.digest:
        raise ValueError(
            f"the tokens that shard {shard} is given now are not those of its states: another version of a package "
            "tokenises otherwise; go on with the versions that made the store"
        )


def _rows(samples: Sequence[Sample]) -> TokenRows:
    return TokenRows(
        [sample.input_ids for sample in samples],
        [sample.loss_mask for sample in samples],
        [sample.origin for sample in samples],
    )


def source_reports(source: Source) -> list[tuple[str, SourceReport]]:
    """Return the reports of a source or, with their names, of the parts of a blend."""
    if isinstance(source, Blend):
        return [
            ("/".join(filter(None, (part.name, name))), report)
            for part in source.parts
            for name, report in source_reports(part.source)
        ]
    return [("", source.report())] if isinstance(source, Reporting) else []


def rows_read(source: Source) -> list[int]:
    """Return how many rows each part of a source has read, where it counts them."""
    return [report.read for _, report in source_reports(source)]


def no_samples(source: Source) -> SourceError:
    """Return the error of a source that was read through and gave nothing: what became of its rows, and why."""
    told = [f"{name}: {why}" if name else why for name, report in source_reports(source) if (why := _why_none(report))]
    return SourceError(f"the source has no samples{': ' if told else ''}{'; '.join(told)}")


def _why_none(report: SourceReport) -> str:
    counts = [
        (report.dropped, "are longer than seq-length and dropped"),
        (report.too_few_supervised, "have fewer supervised tokens than min-supervised"),
        (report.refused, "cannot be used"),
    ]
    told = [f"{count:,} {what}" for count, what in counts if count]
    examples = [f" ({reason.count:,} such as {reason.examples[0]})" for reason in report.reasons.values()]
    return f"of {report.read:,} rows read, {', '.join(told)}{''.join(examples)}" if told else ""


def tell_refusals(source: Source) -> None:
    """Warn of rows that a source has left out, with an example of each reason."""
    for name, report in source_reports(source):
        left_out = report.refused + report.dropped + report.too_few_supervised
        if left_out:
            _log.warning(
                "%s%d of %d rows are left out: %d cannot be used, %d are too long, %d have too few supervised tokens",
                *(f"{name}: " if name else "", left_out, report.read),
                *(report.refused, report.dropped, report.too_few_supervised),
            )
        for reason in report.reasons.values():
            _log.warning("the first of %d such rows: %s", reason.count, reason.examples[0])


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """How many of ``samples`` are cut at ``seq_length``, or have no supervised token.

    ``cut`` were cut for certain; at most ``perhaps_cut`` more were, which a run before has tokenised: it is known of
    them that they fill ``seq_length``, and no more.
    """

    samples: int
    seq_length: int
    cut: int
    perhaps_cut: int
    unsupervised: int

    @classmethod
    def of(
        cls,
        source: Source,
        seq_length: int,
        lengths: np.ndarray | Sequence[int],
        supervised: np.ndarray | Sequence[int],
        read_before: np.ndarray | None = None,
    ) -> SampleCounts:
        """Count all samples, (samples,) each, that a source has just given, but for those that were ``read_before``."""
        cut, perhaps = sum(report.truncated for _, report in source_reports(source)), 0
        if read_before is not None and read_before.any() and _truncates(source.identity()):
            perhaps = int((np.asarray(lengths)[read_before] == seq_length).sum())
        return cls(len(lengths), seq_length, cut, perhaps, int((np.asarray(supervised) == 0).sum()))

    def lines(self) -> tuple[str, str]:
        """Return what is cut and what is not supervised, in numbers and percent."""
        return self._text(self.cut, self.cut + self.perhaps_cut), self._text(self.unsupervised)

    def _text(self, least: int, most: int | None = None) -> str:
        shares = [f"{count / max(1, self.samples):.1%}" for count in (least, most) if count is not None]
        if most in (None, least):
            return f"{least:,} ({shares[0]})"
        return f"{least:,} to {most:,} ({shares[0]} to {shares[1]})"

    def check(self) -> None:
        """Warn when most samples have no supervised token; UnsupervisedError when there are some and none has."""
        if self.samples and self.unsupervised == self.samples:
            raise UnsupervisedError(
                f"none of the {self.samples:,} samples has a supervised token, so there is nothing to learn from them: "
                "see what is supervised with dspark-store tokens (an assistant must speak, before --seq-length)"
            )
        if self.unsupervised > self.samples / 2:
            _log.warning(
                "most samples, %s of %s, have no supervised token: see what is supervised with dspark-store tokens",
                *(self._text(self.unsupervised), f"{self.samples:,}"),
            )


def print_counts(counts: SampleCounts) -> None:
    """Print what is cut and not supervised of the tokens, before their states are captured."""
    cut, unsupervised = counts.lines()
    say(
        f"tokens   {counts.samples:,} samples: {cut} cut at seq-length {counts.seq_length}, {unsupervised} without a "
        "supervised token"
    )


def _truncates(identity: Mapping[str, JsonValue]) -> bool:
    """Tell whether a source, or a part of a blend, cuts what is too long."""
    parts = identity.get("parts")
    if identity.get("type") == "blend" and isinstance(parts, list):
        return any(isinstance(part, Mapping) and _truncates(part) for part in parts)
    return identity.get("over_long") == "truncate"
