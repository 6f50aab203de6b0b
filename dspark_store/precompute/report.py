"""What a finished job tells its user."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.ledger import distinct_bytes
from dspark_store.format.sizes import padded_bytes, ragged_rows_bytes
from dspark_store.precompute.capture import CaptureReport
from dspark_store.precompute.refusals import source_reports
from dspark_store.precompute.undo import UnsupervisedError
from dspark_store.readers.cache import Cache
from dspark_store.sources.source import Source
from dspark_store.text import say, size_text, time_text

_log = logging.getLogger(__name__)


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


def stored_bytes(cache: Cache) -> int:
    """Return the bytes of all objects of a complete store, shared ones once."""
    return int(distinct_bytes(cache.index.objects).sum())


def print_report(cache: Cache, report: CaptureReport) -> None:
    """Print what the store holds, what it cost, how it compares, and what to do next."""
    tokens = int(cache.lengths.sum())
    stored = stored_bytes(cache)
    unsupervised = int((cache.supervised == 0).sum())
    nonfinite = int((cache.status != 0).sum())
    ragged, padded = ragged_rows_bytes(cache.schema, tokens), padded_bytes(cache.schema, len(cache))
    say(
        f"captured {report.tokens:,} tokens of {report.shards} shards in {time_text(report.seconds)}, "
        f"{report.tokens_per_second:,.0f} tokens/s"
    )
    say(
        f"store    {len(cache):,} samples, {tokens:,} tokens (mean {tokens / max(1, len(cache)):.0f}), "
        f"{int(cache.supervised.sum()):,} supervised"
    )
    say(f"layers   {list(cache.layer_ids)} as {cache.schema.dtype.name}, codec {cache.schema.codec}")
    say(
        f"size     {size_text(stored)}: {ragged / stored:.2f}x smaller than ragged rows ({size_text(ragged)}), "
        f"{padded / stored:.2f}x smaller than padded safetensors ({size_text(padded)})"
    )
    if unsupervised:
        say(f"note     {unsupervised:,} samples have no supervised token; they are stored all the same")
    if nonfinite:
        say(
            f"note     {nonfinite:,} samples have states that are not finite in {cache.schema.dtype.name}; "
            "they are marked in index/status and not trained on"
        )
    say(f"next     read it: dspark_store.open_cache({str(getattr(cache.storage, 'root', ''))!r})")
