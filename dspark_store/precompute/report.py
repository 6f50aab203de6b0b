"""What a capture counts and tells: while it runs, and at its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from dspark_store.format.ledger import distinct_bytes
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.sizes import Volume, of_rows_text, padded_bytes, ragged_rows_bytes
from dspark_store.precompute.estimate import stored_range
from dspark_store.precompute.ranks import World
from dspark_store.progress import Progress, start_progress
from dspark_store.readers.cache import Cache
from dspark_store.text import say, size_text, time_text


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What one job captured, on all of its ranks."""

    shards: int
    tokens: int
    stored_bytes: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Valid tokens a second, writing included; 0 when nothing was captured."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class CaptureCounts:
    """Adds up what the ranks of a job have captured of ``shards``, and shows it on rank 0.

    ``lengths`` are the tokens of all N samples; only rank 0 need know them.
    """

    def __init__(self, world: World, record: StoreRecord, shards: Sequence[int], lengths: Sequence[int]) -> None:
        self._world = world
        self._started = time.monotonic()
        self._todo, self._done_before = 0, 0
        self._expected = ""
        self._bar: Progress | None = None
        if world.leads:
            rows = [row for shard in shards for row in record.schema.tokens.rows(shard)]
            todo = [lengths[row] for row in rows]
            self._todo, self._done_before = sum(todo), sum(lengths) - sum(todo)
            least, most = stored_range(record.schema, record.last_layer, Volume.of(record.schema, todo, todo))
            self._expected = f"{size_text(least)} to {size_text(most)} of states expected"
            self._bar = start_progress("capture", sum(lengths), "tokens", self._done_before)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            if error is None:
                self._show(self._count("tokens"))
            self._bar.__exit__(kind, error, trace)

    def batch(self, tokens: int) -> None:
        """Count the valid tokens of a batch."""
        self._show(self._world.keys.add("tokens", tokens))

    def committed(self, tokens: int, stored_bytes: int) -> None:
        """Count a committed shard: its valid tokens and its bytes."""
        for name, count in (("bytes", stored_bytes), ("stored tokens", tokens), ("shards", 1)):
            self._world.keys.add(name, count)

    def wait_for_all(self, shards: int) -> None:
        """Wait until so many shards are committed, and show what others do. StoppedError when the job ends before."""

        def all_committed() -> bool | None:
            self._show(self._count("tokens"))
            return self._count("shards") >= shards or None

        self._world.wait_for(all_committed)

    def report(self, seconds: float) -> CaptureReport:
        """Return what was committed, and the tokens of all shards that were to do."""
        return CaptureReport(self._count("shards"), self._todo, self._count("bytes"), seconds)

    def _count(self, name: str) -> int:
        return self._world.keys.add(name, 0)

    def _show(self, tokens: int) -> None:
        if self._bar is not None:
            self._bar.reach(self._done_before + tokens, self._note)

    def _note(self) -> str:
        stored, tokens = self._count("bytes"), self._count("stored tokens")
        if not stored or not tokens:
            return self._expected
        rate = stored / (time.monotonic() - self._started)
        return f"{size_text(rate)}/s written, about {size_text(stored / tokens * self._todo)} of states in all"


@dataclass(slots=True)
class Profile:
    """Seconds of the thread that makes it, by what it did. ``wait`` is for the encoders, the disk or another rank.

    What other threads do meanwhile is not counted.
    """

    forward: float = 0.0
    copy: float = 0.0
    wait: float = 0.0
    commit: float = 0.0
    _counted: float = field(default=0.0, init=False)
    _thread: int = field(default_factory=threading.get_ident, init=False)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the block's seconds to ``what``, but for those that a block inside it counts as something else."""
        if threading.get_ident() != self._thread:
            yield
            return
        started, counted = time.perf_counter(), self._counted
        try:
            yield
        finally:
            spent = time.perf_counter() - started - (self._counted - counted)
            self._counted += spent
            setattr(self, what, getattr(self, what) + spent)

    def lines(self, seconds: float, encode: float, write: float) -> Iterator[str]:
        """Yield the summary that ``--profile`` prints. ``encode`` and ``write`` are seconds of other threads."""
        rest = seconds - self.forward - self.copy - self.wait - self.commit
        shares = {
            "forward": (self.forward, "the target's forwards"),
            "copy": (self.copy, "waiting for copies off the device"),
            "waiting": (self.wait, "for the encoders, the disk or other ranks"),
            "commit": (self.commit, "for the commit of the shard before"),
            "rest": (rest, "reading tokens, making batches"),
        }
        for name, (spent, what) in shares.items():
            yield f"profile  {name:8} {spent:9.2f} s {spent / seconds if seconds else 0:6.1%}  {what}"
        yield f"profile  {'encode':8} {encode:9.2f} s        in threads, beside all that"
        yield f"profile  {'write':8} {write:9.2f} s        in a thread, beside all that"


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
    say(f"layers   {list(cache.layer_ids)} as {cache.schema.values}, codec {cache.schema.codec}")
    size, beside = (f"{size_text(count)}: {of_rows_text(cache.schema, tokens, count)}" for count in (stored, padded))
    say(f"size     {size} ({size_text(ragged)})", f"padded   {beside}, as safetensors")
    if unsupervised:
        say(f"note     {unsupervised:,} samples have no supervised token; they are stored all the same")
    if nonfinite:
        say(
            f"note     {nonfinite:,} samples have states that are not finite in {cache.schema.dtype.name}; "
            "they are marked in index/status and not trained on"
        )
    say(f"next     read it: dspark_store.open_cache({str(getattr(cache.storage, 'root', ''))!r})")
