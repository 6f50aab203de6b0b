"""Where the reasoning of assistant messages stands in a rendered conversation."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dspark_store.sources.marks import (
    REASONING,
    REASONING_FIELDS,
    MarkedText,
    Marking,
    Span,
    content_pieces,
    is_reasoning,
)
from dspark_store.sources.messages import Message
from dspark_store.sources.rendering import Rendering, RenderLimitError
from dspark_store.sources.source import SourceError


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of the text that goes with reasoning, and where else it might begin.

    "a b b c" loses "b " or " b" when it becomes "a b c": of such places, tokens decide.

    Attributes:
        first, last: the least and the greatest start.
        size: in characters.
        likely: starts that are better than others between the least and the greatest, the best first.

    """

    first: int
    last: int
    size: int
    likely: tuple[int, ...] = ()

    def span(self, is_edge: Callable[[int], bool] | None = None) -> Span:
        """Return the stretch that neither begins nor ends inside of a token, or at least does not end there."""
        likely = [start for start in self.likely if self.first <= start <= self.last]
        starts = list(dict.fromkeys([*likely, *range(self.last, max(self.first, self.last - 256) - 1, -1)]))
        if is_edge is not None and len(starts) > 1:
            ending = [start for start in starts if is_edge(start + self.size)]
            starts = [start for start in ending if is_edge(start)] or ending or starts
        return starts[0], starts[0] + self.size


def removed_stretch(text: str, without: str, core: Span | None) -> Stretch | None:
    """Return the stretch of `text` that is missing from `without`, or None if there is none.

    Args:
        text: the original.
        without: the original after something was taken out.
        core: what the stretch must contain, if known.

    If more changed than one piece that was taken out, it is everything from the first difference to the last.

    """
    if text == without:
        return None
    missing = len(text) - len(without)
    head = _common_prefix_length(text, without)
    tail = _common_prefix_length(text[::-1], without[::-1])
    if core is None:
        core = (len(text), 0)  # contained in any stretch
    latest = min(core[0], head)
    earliest = max(core[1] - missing, len(without) - tail)
    if missing > 0 and earliest <= latest:
        return Stretch(earliest, latest, missing)
    stop = max(core[1], len(text) - min(tail, len(without) - latest))
    return Stretch(latest, latest, stop - latest) if latest < stop else None


class ReasoningFinder:
    """Finds the reasoning of a conversation, and what vanishes along with it, such as delimiters.

    Attributes:
        warnings: of messages whose reasoning the template leaves out.

    """

    def __init__(self, rendering: Rendering, marked: tuple[Marking, MarkedText] | None) -> None:
        """Take the conversation and where its marks are, if they could be put."""
        self._rendering = rendering
        self._messages = rendering.messages
        self._text = rendering.text
        self._marked = marked
        self.warnings: list[str] = []

    def stretches(self, likely: Callable[[int, int], tuple[list[int], list[int]]]) -> list[Stretch]:
        """Return the stretches.

        One render of the conversation without any reasoning shows what vanishes between two marks that stay. Where
        there are no such marks, a render without the reasoning of each message does.

        Args:
            likely: given a message and a place in it, where stretches are likely to begin, the best first, and where
                they are likely to end.

        """
        thinking = [index for index, message in enumerate(self._messages) if has_reasoning(message)]
        if not thinking:
            return []
        if self._marked is None:
            self._rendering.expect(2 * len(thinking))
            found: dict[int, list[Stretch] | None] = {index: self._alone(index) for index in thinking}
        else:
            between = _BetweenMarks(*self._marked, self._without_any())
            found = {index: between.stretches(index) for index in thinking}
            found |= {index: self._alone(index) for index, its in found.items() if its is None}
        stretches = []
        for index, its in found.items():
            if not its:
                self.warnings.append(f"the chat template does not render the reasoning of message {index}")
            for stretch in its or []:
                begins, ends = likely(index, stretch.last)
                starts = (*begins, *(end - stretch.size for end in ends))
                stretches.append(replace(stretch, likely=starts))
        return stretches

    def _without_any(self) -> MarkedText:
        marking, _ = self._marked if self._marked is not None else (Marking(self._messages), None)
        return marking.read(self._without(marking, self._rendering.render))

    def _alone(self, index: int) -> list[Stretch]:
        """Return the stretch of one message, by two renders."""
        marking = Marking([self._messages[index]], kinds=(REASONING,))
        found = marking.read(self._render_with(index, marking.messages()[0]))
        core = next(iter(found.spans.values())) if len(found.spans) == 1 and found.text == self._text else None
        without = self._without(marking, lambda messages: self._render_with(index, messages[0]))
        stretch = removed_stretch(self._text, without, core)
        return [] if stretch is None else [stretch]

    @staticmethod
    def _without(marking: Marking, render: Callable[[Sequence[Message]], str]) -> str:
        """Render without the keys that hold reasoning, or with empty ones for a template that needs the keys."""
        try:
            return render(marking.without_reasoning())
        except RenderLimitError:
            raise
        except SourceError:
            return render(marking.without_reasoning(emptied=True))

    def _render_with(self, index: int, message: Message) -> str:
        return self._rendering.render([*self._messages[:index], message, *self._messages[index + 1 :]])


class _BetweenMarks:
    """What two renders with the same marks, with reasoning and without, have between them."""

    def __init__(self, marking: Marking, found: MarkedText, without: MarkedText) -> None:
        self._found, self._without = found, without
        self._cores: dict[int, list[Span]] = {}
        ends = [(0, 0, -1), (len(found.text), len(without.text), marking.size)]
        for number, span in found.spans.items():
            mark = marking.marks[number]
            if mark.piece.kind == REASONING:
                self._cores.setdefault(mark.message, []).append(span)
            elif number in without.spans:
                ends += [(*pair, mark.message) for pair in zip(span, without.spans[number], strict=True)]
        self._anchors = sorted(ends)
        self._places = [place for place, _, _ in self._anchors]
        self._all = sorted((*span, message) for message, spans in self._cores.items() for span in spans)

    def stretches(self, index: int) -> list[Stretch] | None:
        """Return those of a message; None if marks do not set them apart from those of others."""
        gaps: dict[tuple[int, int], Span] = {}
        for start, stop in sorted(self._cores.get(index, [])):
            gap = bisect_right(self._places, start) - 1, bisect_left(self._places, stop)
            first, _ = gaps.get(gap, (start, stop))
            gaps[gap] = first, stop
        if not gaps:
            return self._dropped(index)
        stretches = []
        for (left, right), core in gaps.items():
            (start, start_without, _), (stop, stop_without, _) = self._anchors[left], self._anchors[right]
            others = self._all[bisect_left(self._all, (start,)) : bisect_left(self._all, (stop,))]
            if start_without > stop_without or any(message != index for _, _, message in others):
                return None
            text, without = self._found.text[start:stop], self._without.text[start_without:stop_without]
            stretch = removed_stretch(text, without, (core[0] - start, core[1] - start))
            if stretch is not None:
                stretches.append(replace(stretch, first=stretch.first + start, last=stretch.last + start))
        return stretches or None

    def _dropped(self, index: int) -> list[Stretch] | None:
        """Return no stretch if the text is the same without the reasoning; None if it is not."""
        before = [(place, other) for place, other, message in self._anchors if message < index]
        behind = [(place, other) for place, other, message in self._anchors if message > index]
        (start, start_without), (stop, stop_without) = max(before), min(behind)
        same = self._found.text[start:stop] == self._without.text[start_without:stop_without]
        return [] if same else None


def has_reasoning(message: Message) -> bool:
    """Tell whether a message holds reasoning of the assistant, in a field or in its content."""
    if message["role"] != "assistant":
        return False
    fields = any(is_reasoning(message, field) for field in REASONING_FIELDS)
    return fields or any(piece.kind == REASONING for piece in content_pieces(message))


def _common_prefix_length(left: str, right: str) -> int:
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
