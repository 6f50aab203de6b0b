"""What the check of a shard collects: damage of the same kind in one object becomes one problem."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from dspark_store.format.problem import Part, Problem


@dataclass(slots=True)
class Findings:
    """Problems of one shard, whose samples are ``samples``."""

    shard: int
    samples: range
    _problems: list[Problem] = field(default_factory=list)
    _all: tuple[int, ...] = ()
    """The samples, once for all problems that hit them all."""

    def add(self, part: Part, key: str, message: str, rows: Iterable[int] | None = None) -> None:
        """Report an object; ``rows`` are the rows of the shard that are hit, by default all."""
        if rows is not None:
            samples = tuple(self.samples.start + row for row in sorted(set(rows)))
        else:
            samples = self._all = self._all if len(self._all) == len(self.samples) else tuple(self.samples)
        self._problems.append(Problem(part, key, self.shard, samples, message))

    def add_rows(self, part: Part, key: str, messages: dict[int, str]) -> None:
        """Report rows of an object, each with its message; nothing when there are none."""
        if messages:
            first, *others = [messages[row] for row in sorted(messages)]
            more = f" (and {len(others)} more)" if others else ""
            self.add(part, key, first + more, messages)

    def __iter__(self) -> Iterator[Problem]:
        return iter(self._problems)
