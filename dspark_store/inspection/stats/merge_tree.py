"""Merging what the shards gave: the same bits in whatever order the results come, and few of them in memory."""

from __future__ import annotations

from typing import Protocol, Self


class Mergeable(Protocol):
    """A partial result that joins with the one of the samples behind it."""

    def merge(self, later: Self) -> Self:
        """Return the result of both."""
        ...


class MergeTree[Part: Mergeable]:
    """Merges ``leaves`` parts, numbered from 0, along a fixed binary tree.

    Adding floating-point numbers in another order gives other bits. Here neighbours 2k and 2k + 1 are merged, then
    neighbours among those, and so on, whenever both are there: which parts meet does not depend on the order in which
    they come. When they come nearly in order, as many are held as the tree has levels, even while one is late.
    """

    def __init__(self, leaves: int) -> None:
        self._leaves = leaves
        self._waiting: dict[tuple[int, int], Part] = {}

    @property
    def held(self) -> int:
        """Parts that wait for their neighbour."""
        return len(self._waiting)

    def add(self, leaf: int, part: Part) -> None:
        """Take the part of a leaf; each once. IndexError for one outside the tree."""
        if not 0 <= leaf < self._leaves:
            raise IndexError(f"part {leaf} is outside the {self._leaves} parts")
        level, place, width = 0, leaf, self._leaves
        while width > 1:
            neighbour = place ^ 1
            if neighbour < width:
                other = self._waiting.pop((level, neighbour), None)
                if other is None:
                    break
                part = part.merge(other) if place < neighbour else other.merge(part)
            level, place, width = level + 1, place // 2, (width + 1) // 2
        self._waiting[level, place] = part

    def result(self) -> Part | None:
        """Return all parts merged, None where there are none; ValueError while one is missing."""
        if self._leaves == 0:
            return None
        if len(self._waiting) != 1 or (self._top, 0) not in self._waiting:
            raise ValueError(f"not all of the {self._leaves} parts have come")
        return self._waiting[self._top, 0]

    @property
    def _top(self) -> int:
        return (self._leaves - 1).bit_length()
