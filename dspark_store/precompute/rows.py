"""What became of a source's rows: left out, cut, without a supervised token."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.precompute.undo import UnsupervisedError
from dspark_store.sources.blend import Blend
from dspark_store.sources.source import Reporting, Source, SourceError, SourceReport
from dspark_store.text import say

_log = logging.getLogger(__name__)


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
