"""What a capture has done so far, over all ranks, and its progress on rank 0."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from dspark_store.format.manifest import StoreRecord
from dspark_store.format.sizes import Volume
from dspark_store.precompute.capture import CaptureReport
from dspark_store.precompute.estimate import stored_range
from dspark_store.precompute.ranks import World
from dspark_store.progress import Progress, start_progress
from dspark_store.text import size_text


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
            self._expected = f"{size_text(least)} to {size_text(most)} expected in all"
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
        return f"{size_text(rate)}/s written, about {size_text(stored / tokens * self._todo)} in all"
