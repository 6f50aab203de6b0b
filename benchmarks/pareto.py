"""Which of several choices are beaten by none in both size and speed."""

from __future__ import annotations

from collections.abc import Sequence


def pareto_front(sizes: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """Return the indices of the choices that no other is both as small and as fast as, and better in one; by size.

    Of equal choices the first is kept.
    """
    front: list[int] = []
    fastest = float("-inf")
    for at in sorted(range(len(sizes)), key=lambda at: (sizes[at], -speeds[at], at)):
        if speeds[at] > fastest:
            front.append(at)
            fastest = speeds[at]
    return front
