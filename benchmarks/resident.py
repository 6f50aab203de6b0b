"""Resident memory of this process, by Linux's own account."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def resident_bytes(field: str) -> int:
    """Return a line of this process's /proc status in bytes: VmRSS now, or VmHWM, the peak since the last reset.

    LookupError when there is no such line.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {field}")


def peak_of(action: Callable[[], object]) -> int:
    """Run an action; return the most bytes that were resident meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")
    action()
    return resident_bytes("VmHWM")
