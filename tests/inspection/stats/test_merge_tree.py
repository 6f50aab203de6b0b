"""The fixed tree: the same bits in any order, few parts held, and nothing forgotten."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.inspection.shardwise import MergeTree


@dataclass(frozen=True)
class Span:
    """The leaves from start to stop, and how they were joined."""

    start: int
    stop: int
    text: str

    def merge(self, later: "Span") -> "Span":
        assert self.stop == later.start
        return Span(self.start, later.stop, f"({self.text} {later.text})")


def leaf(number: int) -> Span:
    return Span(number, number + 1, str(number))


def merged(order: list[int]) -> Span | None:
    tree = MergeTree[Span](len(order))
    for number in order:
        tree.add(number, leaf(number))
    return tree.result()


@given(st.integers(1, 40).flatmap(lambda count: st.permutations(range(count))))
def test_any_order_joins_neighbours_the_same_way(order):
    result = merged(order)
    assert result is not None
    assert (result.start, result.stop) == (0, len(order))
    assert result == merged(sorted(order))


def test_the_tree_is_that_of_neighbours():
    joined = merged([4, 2, 0, 3, 1])
    assert joined is not None
    assert joined.text == "(((0 1) (2 3)) 4)"


@given(st.integers(2, 2000))
def test_while_the_first_is_late_no_more_wait_than_the_tree_has_levels(count):
    tree = MergeTree[Span](count)
    for number in range(1, count):
        tree.add(number, leaf(number))
        assert tree.held <= 2 * (count - 1).bit_length()
    tree.add(0, leaf(0))
    assert tree.held == 1


def test_no_parts_have_no_result():
    assert MergeTree[Span](0).result() is None


def test_a_missing_part_and_one_too_many_are_refused():
    tree = MergeTree[Span](3)
    tree.add(0, leaf(0))
    tree.add(1, leaf(1))
    with pytest.raises(ValueError, match="not all of the 3 parts"):
        tree.result()
    with pytest.raises(IndexError, match="part 3 is outside the 3 parts"):
        tree.add(3, leaf(3))
