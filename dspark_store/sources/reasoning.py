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
from dspark_store.sources.rendering import Rendering
from dspark_store.sources.turns import Turns


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


def reasoning_stretches(turns: Turns, tagged: Sequence[Span] | None) -> tuple[list[Stretch], list[str]]:
    """Return the stretches of reasoning of a conversation, with what vanishes along with it, such as delimiters.

    One render of the conversation without any reasoning shows what vanishes between two marks that stay. Where there
    are no such marks, a render without the reasoning of each message does.

    Args:
        turns: where its messages stand.
        tagged: the stretches inside of generation tags, which reasoning is likely to begin with; None without tags.

    Returns:
        The stretches, and warnings of messages whose reasoning the template leaves out.

    """
    rendering = turns.rendering
    thinking = [index for index, message in enumerate(rendering.messages) if has_reasoning(message)]
    found: dict[int, list[Stretch] | None]
    if turns.marked is None:
        rendering.expect(2 * len(thinking))
        found = dict.fromkeys(thinking)
    else:
        between = _BetweenMarks(*turns.marked, turns.marked[0].read(_render_without(rendering, turns.marked[0], 0)))
        found = {index: between.stretches(index) for index in thinking}
    stretches, warnings = [], []
    for index, between_marks in found.items():
        its = _alone(rendering, index) if between_marks is None else between_marks
        if not its:
            warnings.append(f"the chat template does not render the reasoning of message {index}")
        for stretch in its:
            if tagged is None:
                likely = turns.reasoning_starts(index)
            else:
                likely = [start for start, stop in tagged if start <= stretch.last < stop]
            content = turns.content_start(index)
            likely += [] if content is None else [content - stretch.size]
            stretches.append(replace(stretch, likely=tuple(likely)))
    return stretches, warnings


def _alone(rendering: Rendering, index: int) -> list[Stretch]:
    """Return the stretch of one message, by two renders."""
    marking = Marking([rendering.messages[index]], kinds=(REASONING,))
    found = marking.read(rendering.render(_with(rendering, index, marking.messages())))
    core = next(iter(found.spans.values())) if len(found.spans) == 1 and found.text == rendering.text else None
    stretch = removed_stretch(rendering.text, _render_without(rendering, marking, index), core)
    return [] if stretch is None else [stretch]


def _render_without(rendering: Rendering, marking: Marking, first: int) -> str:
    """Render without the keys that hold reasoning, or with empty ones for a template that needs the keys.

    The marked messages take the place of those from `first` on.
    """
    text = rendering.attempt(_with(rendering, first, marking.without_reasoning()))
    if text is None:
        text = rendering.render(_with(rendering, first, marking.without_reasoning(emptied=True)))
    return text


def _with(rendering: Rendering, first: int, messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with other messages from `first` on."""
    return [*rendering.messages[:first], *messages, *rendering.messages[first + len(messages) :]]


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
