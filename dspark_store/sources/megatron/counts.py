"""Counting what became of the records of a pair, while its samples are read."""

from dspark_store.sources.megatron.documents import Plan
from dspark_store.sources.report import SourceReport
from dspark_store.sources.source import Sample


class ReadCounts:
    """Adds what one reading goes through to a report.

    An empty document is counted as read and as empty; it is no refusal, for the format allows it.
    """

    def __init__(self, plan: Plan, report: SourceReport, cursor: int) -> None:
        """Begin at a cursor."""
        self._plan, self._report = plan, report
        self._records = plan.records_before(cursor) if cursor else 0  # empty ones at the beginning are counted too
        self._given = 0  # samples that the record being read has given

    def add(self, number: int, sample: Sample, *, given: bool) -> None:
        """Count the sample of a number, and the records that are done after it; `given` is whether it is kept."""
        report, supervised = self._report, int(sample.loss_mask.sum())
        if given:
            report.samples += 1
            report.tokens += len(sample.input_ids)
            report.supervised += supervised
            report.unsupervised += not supervised
        else:
            report.too_few_supervised += 1
        self._given += given
        records = self._plan.records_before(number + 1)
        for record in range(self._records, records):
            self._add_record(record)
        if records > self._records:
            self._records, self._given = records, 0

    def _add_record(self, record: int) -> None:
        report, outcome = self._report, self._plan.outcome(record)
        report.read += 1
        if outcome == "empty":
            report.empty += 1
        elif outcome == "dropped":
            report.dropped += 1
        elif self._given:
            report.kept += 1
            report.truncated += outcome == "truncated"
            report.split += outcome == "split"
