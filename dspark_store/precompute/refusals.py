"""What became of the rows that a source could not use."""

from __future__ import annotations

import logging

from dspark_store.sources.blend import Blend
from dspark_store.sources.source import Reporting, Source, SourceError, SourceReport

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
