"""How a job's time was shared."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Profile:
    """Seconds of one rank's main thread, by what it did. ``wait`` is for the encoders, the disk or another rank."""

    forward: float = 0.0
    copy: float = 0.0
    wait: float = 0.0
    commit: float = 0.0
    _counted: float = field(default=0.0, init=False)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the block's seconds to ``what``, but for those that a block inside it counts as something else."""
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
            "commit": (self.commit, "the last chunks, fsync and ledger rows"),
            "rest": (rest, "reading tokens, making batches"),
        }
        for name, (spent, what) in shares.items():
            yield f"profile  {name:8} {spent:9.2f} s {spent / seconds if seconds else 0:6.1%}  {what}"
        yield f"profile  {'encode':8} {encode:9.2f} s        in threads, beside all that"
        yield f"profile  {'write':8} {write:9.2f} s        in a thread, beside all that"
