"""What a test asks of the zygote, and what it hears back: plain values that travel as JSON."""

import json
import signal
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Strike:
    """A signal to some ranks (none named: all), after some seconds, and once any of them has told of ``event``.

    ``met`` waits as well until every rank has joined the job: who waits for a rank 0 that died before is not told.
    """

    ranks: tuple[int, ...] = ()
    after: float = 0.0
    event: str = ""
    number: int = signal.SIGKILL
    met: bool = False


@dataclass(frozen=True, slots=True)
class Plant:
    """What happens in a rank in place of the n-th call (from 1 on) of a stage of the job: see `traces.STAGES`.

    It raises; sleeps for some seconds before it goes on; or, "each", sleeps before every call.
    """

    rank: int
    stage: str
    what: Literal["raise", "sleep", "each"] = "raise"
    seconds: float = 0.0
    nth: int = 1


@dataclass(frozen=True, slots=True)
class Order:
    """One job: the command's arguments, the number of its ranks, and what is to befall them.

    ``folder`` gets a trace and a log a rank. ``kill_at`` kills rank 0 in place of the n-th counted call, counted from
    1. ``gate`` lets no rank take a shard before all can. Whoever lives after ``limit`` seconds is killed.
    """

    arguments: list[str]
    store: str
    folder: str
    world: int = 1
    strike: Strike | None = None
    plants: tuple[Plant, ...] = ()
    kill_at: int | None = None
    gate: bool = False
    limit: float = 300.0

    def to_line(self) -> str:
        """Return the line that the zygote reads."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> "Order":
        fields: dict[str, Any] = json.loads(line)
        strike = fields.pop("strike")
        plants = tuple(Plant(**plant) for plant in fields.pop("plants"))
        return cls(**fields, strike=None if strike is None else Strike(**strike), plants=plants)

    def file(self, rank: int, kind: str) -> Path:
        """Return where a rank's trace or log is."""
        return Path(self.folder) / f"rank{rank}.{kind}"

    @property
    def reply(self) -> Path:
        """Where the zygote puts its `Ends` when all ranks have ended."""
        return Path(self.folder) / "reply.json"


@dataclass(frozen=True, slots=True)
class Ends:
    """How ranks ended: wait status and time of each, when the strike fell, and what outlived them.

    Times are of one clock that all processes of the machine share; ``left`` counts processes that ranks had started.
    """

    statuses: list[int]
    times: list[float]
    started: float
    struck: float | None
    left: int
    overdue: bool


@dataclass(frozen=True)
class RankOutcome:
    """What became of one rank: its exit code (negative: the signal), when it ended and what it did."""

    exit_code: int
    ended: float
    events: tuple[tuple[float, str], ...]
    log: str

    def count(self, event: str) -> int:
        return sum(text == event for _, text in self.events)

    def numbers(self, event: str) -> tuple[int, ...]:
        """Return what followed the event's name, each time."""
        return tuple(int(text.rpartition(" ")[2]) for _, text in self.events if text.rpartition(" ")[0] == event)


@dataclass(frozen=True)
class Outcome:
    """What became of a job, rank by rank."""

    ends: Ends
    ranks: tuple[RankOutcome, ...] = field(default=())

    @cached_property
    def exit_codes(self) -> list[int]:
        return [rank.exit_code for rank in self.ranks]

    @property
    def exit_code(self) -> int:
        return self.ranks[0].exit_code

    @property
    def seconds(self) -> float:
        return max(self.ends.times) - self.ends.started

    @property
    def logs(self) -> list[str]:
        return [rank.log for rank in self.ranks]

    @property
    def log(self) -> str:
        return "\n".join(f"[rank {number}] {rank.log}" for number, rank in enumerate(self.ranks))

    @property
    def calls(self) -> int:
        """Counted calls of rank 0."""
        return sum(text.startswith("call ") for _, text in self.ranks[0].events)

    @property
    def shards(self) -> tuple[int, ...]:
        """Shards that were begun, by any rank."""
        return tuple(number for rank in self.ranks for number in rank.numbers("shard"))

    @property
    def forwards(self) -> int:
        """Forwards of any rank whose states were wanted."""
        return sum(rank.count("forward") for rank in self.ranks)

    @property
    def planted(self) -> float:
        """When the first plant came into effect."""
        return min(when for rank in self.ranks for when, text in rank.events if text == "planted")

    def seconds_after(self, moment: float) -> float:
        """Return how long after a moment the last rank ended."""
        return max(self.ends.times) - moment
