"""Which process of which host something belongs to, and whether that process still runs."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from dspark_store.format.jsonvalue import parse_json

_UNKNOWN = "?"
_PIDS = 2**31


@dataclass(frozen=True, slots=True)
class ProcessName:
    """A process for all time: process ids come again, but not with the same start.

    ``space`` is the host's space of process ids: containers on a host may share its name and still have one each.
    ``started`` is in clock ticks since boot. Where the system does not tell, both are "?".
    """

    host: str
    space: str
    pid: int
    started: str

    @classmethod
    def own(cls) -> ProcessName:
        """Name this process."""
        return cls(socket.gethostname(), _space(), os.getpid(), _started(os.getpid()))

    def to_json(self) -> str:
        """Return this as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> ProcessName:
        """Read back what `to_json` returned, whatever else stands beside it; ValueError when it is not there."""
        fields = parse_json(text.encode() if isinstance(text, str) else text)
        if isinstance(fields, Mapping):
            host, space, pid, started = (fields.get(name) for name in ("host", "space", "pid", "started"))
            if type(pid) is int and 0 < pid < _PIDS and all(isinstance(text, str) for text in (host, space, started)):
                return cls(str(host), str(space), pid, str(started))
        raise ValueError(f"{text[:100]!r} names no process")

    @property
    def is_local(self) -> bool:
        """Whether this process can see that one."""
        return (self.host, self.space) == (socket.gethostname(), _space())

    @property
    def still_runs(self) -> bool:
        """Whether a process that `is_local` has not ended; a zombie has."""
        found = _started(self.pid)
        return found != "" and (found == self.started or _UNKNOWN in (found, self.started))


def _space() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return _UNKNOWN


def _started(pid: int) -> str:
    """Return when a process of this host started; empty when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # it holds the program's name
    except OSError:
        return _UNKNOWN if _exists(pid) else ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
