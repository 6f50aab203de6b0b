"""Where each message stands in a rendered conversation: told by known seams, by marks, or by first messages alone."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dspark_store.sources.marks import (
    CALL,
    CONTENT,
    KINDS,
    REASONING_FIELDS,
    MarkedText,
    Marking,
    Span,
    content_pieces,
    mark_render,
)
from dspark_store.sources.messages import Message
from dspark_store.sources.rendering import Rendering
from dspark_store.sources.seams import Roles, common_end, explain, learn_edges
from dspark_store.sources.source import SourceError


@dataclass(slots=True)
class Place:
    """Where what a message holds stands in the text, as far as it is known.

    Attributes:
        start: of its first mark; what stands before the mark and is its own counts, where the text has it.
        stop: of its last mark; white space behind that does not count.
        opening: as `start`, without calls.
        said: as `start`, of its content that is no reasoning.
        content: of its content, if that is plain text without white space around it.

    """

    start: int | None = None
    stop: int | None = None
    opening: int | None = None
    said: int | None = None
    content: Span | None = None


def marked_places(messages: Sequence[Message], text: str, marking: Marking, found: MarkedText) -> list[Place]:
    """Return the place of each message by marks."""
    places = [Place() for _ in messages]
    for number, (first, stop) in found.spans.items():
        mark = marking.marks[number]
        piece, place = mark.piece, places[mark.message]
        start = first - len(piece.before) if text.endswith(piece.before, 0, first) else first
        place.start = _least(place.start, start)
        place.stop = max(place.stop or 0, stop)
        if piece.kind != CALL:
            place.opening = _least(place.opening, start)
        if piece.kind == CONTENT:
            place.said = _least(place.said, start)
            if _is_plain(messages[mark.message]) and stop - start == len(piece.core):
                place.content = start, stop
    return places


class Turns:
    """The stretches of the messages of one conversation.

    What the seams that are known of the template, or marks in a second render, leave open, which is how a message ends,
    is looked for in renders of the first messages: once for each way that a template has of putting two messages
    together. Where marks cannot be put, each boundary is the end of the first messages rendered alone.

    Attributes:
        rendering: the conversation.
        marked: its marks and where they are; None if none were put.

    """

    def __init__(self, rendering: Rendering, *, needs_marks: bool) -> None:
        """Look at the conversation; RenderLimitError if it surely needs too many renders."""
        self.rendering = rendering
        self.marked: tuple[Marking, MarkedText] | None = None
        self._messages, self._text, self._prompts = rendering.messages, rendering.text, rendering.known.prompts
        self._eos = rendering.renderer.eos_token
        self._places = [Place() for _ in self._messages]
        self._known = {len(self._messages): len(self._text)}
        explained = None if needs_marks else explain(rendering.known, self._messages, self._text)
        if explained is not None:
            contents, boundaries = explained
            self._places = [Place(start, stop, start, None, (start, stop)) for start, stop in contents]
            self._known.update(boundaries)
        else:
            self.marked = mark_render(rendering.render, self._messages, self._text)
            if self.marked is not None:
                self._places = marked_places(self._messages, self._text, *self.marked)
            else:
                said = [index for index, message in enumerate(self._messages) if message["role"] == "assistant"]
                rendering.expect(len({*said, *(index + 1 for index in said)} - {0, len(self._messages)}))
        self._others = sorted(
            (place.start, index)
            for index, place in enumerate(self._places)
            if place.start is not None and self._messages[index]["role"] != "assistant"
        )

    def span(self, index: int, without_header: bool = False) -> Span:
        """Return the stretch of a message, with or without its header."""
        start = self._header_end(index) if without_header else self._boundary(index)
        return start, self._boundary(index + 1)

    def span_said(self, index: int, without_header: bool) -> Span:
        """Return the stretch of an answer; SourceError if what another message says stands inside of it."""
        start, stop = self.span(index, without_header)
        place = bisect_left(self._others, (start, -1))
        if place < len(self._others) and self._others[place][0] < stop:
            raise SourceError(
                f"the chat template writes what message {self._others[place][1]} says behind the beginning of message "
                f"{index}, so where that ends cannot be told; use a template with {{% generation %}} tags"
            )
        return start, stop

    def prompt_span(self, index: int) -> Span:
        """Return the stretch of an answer that the generation prompt wrote: the longest of its modes found whole."""
        start = self._boundary(index)
        prompts = self.rendering.generation_prompts(self._messages[:index])
        return start, start + max((len(text) for text in prompts if self._text.startswith(text, start)), default=0)

    def closing(self) -> int:
        """Return where that begins which the template writes to close the last message."""
        last = len(self._messages) - 1
        if self._has_calls(last) or str(self._messages[last].get("content") or "").strip():
            text = self.rendering.attempt([*self._messages[:-1], {"role": "assistant", "content": "\ue000"}]) or ""
            _, mark, tail = text.rpartition("\ue000")
            if mark and self._text.endswith(tail):
                return len(self._text) - len(tail)
        stops = []
        if self.marked is not None:
            marking, found = self.marked
            marks = ((marking.marks[number], stop) for number, (_, stop) in found.spans.items())
            stops = [stop for mark, stop in marks if mark.message == last and mark.piece.core]
        return max(stops) if stops else self._header_end(last)

    def reasoning_starts(self, index: int) -> list[int]:
        """Return where the reasoning of a message is likely to begin: with the message, or behind its header."""
        return [self._boundary(index), self._header_end(index)]

    def content_start(self, index: int) -> int | None:
        """Return where the content of a message begins, if it is known."""
        return self._places[index].said

    def learn(self) -> None:
        """Keep what the template wrote around the contents and between them, for all conversations."""
        for index in range(1, len(self._messages)):
            self._boundary(index)
        contents = [place.content for place in self._places]
        learn_edges(self.rendering.memory, self._messages, self._text, contents, self._known)

    def _header_end(self, index: int) -> int:
        """Return where the header of an assistant message ends."""
        start = self._boundary(index)
        for prompt in self._prompts:
            if self._text.startswith(prompt, start):
                return start + len(prompt)
        return max(start, self._places[index].opening or 0)

    def _boundary(self, index: int) -> int:
        """Return where a message begins and the one before it ends; what opens every text is no part of a first one."""
        if index not in self._known:
            self._known[index] = self._found(index) if index else self._prompted(0, len(self._text)) or 0
        return self._known[index]

    def _found(self, index: int) -> int:
        text, places = self._text, self._places
        anchor = next((before for before in reversed(range(index)) if places[before].stop is not None), None)
        if anchor is None:
            return self._required(index, self._end_of_first(index))
        roles: Roles = str(self._messages[index - 1]["role"]), str(self._messages[index]["role"])
        left, right = places[anchor].stop or 0, places[index].start
        if roles[1] == "assistant":
            starts = (place.start for place in places[index:] if place.start is not None and place.start >= left)
            place = self._prompted(left, next(starts, len(text)), follows_call=self._has_calls(index - 1))
            if place is not None:
                return place
        if right is not None and right >= left:
            back = self.rendering.memory.seam(roles, text[left:right])
            if back is not None:
                return right - back
        boundary = self._located(index, anchor, left)
        if right is not None and left <= boundary <= right and anchor == index - 1:
            whole = not self._has_calls(anchor) and not content_pieces(self._messages[anchor])[-1].after
            self.rendering.memory.learn_seam(roles, text[left:boundary], text[boundary:right], whole=whole)
        return boundary

    def _located(self, index: int, anchor: int, left: int) -> int:
        """Return the boundary by what closes the first messages when nothing follows."""
        tail = self._tail(self._messages[:index], anchor)
        rest = self._text[left:]
        if tail is not None and rest.startswith(tail) and not self._closes_with_nothing(index - 1, tail):
            return left + len(tail)
        closing = self._closing(index, anchor, left)
        if closing is None and tail is not None:
            closing = shared_prefix_length(tail, rest, self._eos)
        if closing is not None:
            return left + closing
        boundary = self._end_of_first(index)
        if boundary is None and self._messages[index]["role"] == "assistant":
            boundary = self._prompted(left, len(self._text))
        return self._required(index, boundary)

    def _closing(self, index: int, anchor: int, left: int) -> int | None:
        """Return how long what closes a message is that is closed in another way when it is the last.

        It is what stands in front of the prompt when the assistant goes on, or what the text has before that with
        which the next message begins when it is the first of a conversation.
        """
        more: list[Message] = [*self._messages[:index], {"role": "assistant", "content": "a"}]
        tail = self._tail(more, anchor) if self._prompts else None
        if tail is not None:
            find = str.rfind if self._has_calls(index - 1) else str.find
            places = [place for place in (find(tail, prompt) for prompt in self._prompts) if place >= 0]
            if places and self._text.startswith(tail[: places[0]], left):
                return places[0]
        right = self._places[index].start
        prompted = bool(self._prompts) and self._messages[index]["role"] == "assistant"
        opening = None if prompted else self._opening(self._messages[index])
        if opening is None or right is None or right < left:
            return None
        gap, renderer = self._text[left:right], self.rendering.renderer
        size = len(common_end(gap, opening))
        size = min(len(piece) - renderer.whole_special_tokens(piece, len(piece) - size) for piece in (gap, opening))
        is_header = size == len(opening) or renderer.ends_special(opening[: len(opening) - size])
        return len(gap) - size if size and is_header else None

    def _opening(self, message: Message) -> str | None:
        """Return what the template writes before a message that is the only one."""
        text, places = self._read([message])
        return None if places[0].start is None else text[: places[0].start]

    def _tail(self, messages: Sequence[Message], anchor: int) -> str | None:
        """Return what stands behind a message when only these are rendered; None if that cannot be told."""
        text, places = self._read(messages)
        return None if places[anchor].stop is None else text[places[anchor].stop :]

    def _read(self, messages: Sequence[Message]) -> tuple[str, list[Place]]:
        """Return the text and the places of other messages; no place is known where the template refuses them."""
        marking = Marking(messages, KINDS if self.marked is None else self.marked[0].kinds)
        found = marking.read(self.rendering.attempt(marking.messages()) or "")
        return found.text, marked_places(messages, found.text, marking, found)

    def _end_of_first(self, index: int) -> int | None:
        """Return where the first messages end by rendering only them; None if the template then writes them anew."""
        first = self._messages[:index]
        for messages in (first, _without_reasoning(first)):
            prefix = self.rendering.attempt(messages)
            boundary = None if prefix is None else shared_prefix_length(prefix, self._text, self._eos)
            if prefix is None or boundary is not None:
                return boundary
        return None

    def _required(self, index: int, boundary: int | None) -> int:
        if boundary is None:
            raise SourceError(
                f"the chat template rewrites earlier turns: the text of the first {index} messages alone is not found "
                "in that of the whole conversation, so its assistant messages cannot be located; use a template with "
                "{% generation %} tags"
            )
        return boundary

    def _prompted(self, left: int, limit: int, *, follows_call: bool = False) -> int | None:
        """Return where the prompt of an assistant stands between two places: the last, if arguments may hold one."""
        find = str.rfind if follows_call else str.find
        places = (find(self._text, prompt, left, limit) for prompt in self._prompts)
        return next((place for place in places if place >= 0), None)

    def _has_calls(self, index: int) -> bool:
        return bool(self._messages[index].get("tool_calls"))

    def _closes_with_nothing(self, index: int, tail: str) -> bool:
        behind = content_pieces(self._messages[index])[-1].after
        return tail in ("", behind, behind.rstrip())


def shared_prefix_length(prefix: str, full: str, terminator: str | None) -> int | None:
    """Return how much of `full` the prefix stands for, or None if it is no prefix.

    A template may close any render with a terminator (the EOS token) that the longer render does not have there, so
    a longer prefix may end with the terminator in place of what `full` has; it is then not counted.
    """
    if full.startswith(prefix):
        return len(prefix)
    if terminator and len(terminator) < len(prefix) <= len(full) and prefix.endswith(terminator):
        shorter = prefix[: -len(terminator)]
        return len(shorter) if full.startswith(shorter) else None
    return None


def _without_reasoning(messages: Iterable[Message]) -> list[Message]:
    return [{key: value for key, value in message.items() if key not in REASONING_FIELDS} for message in messages]


def _least(known: int | None, place: int) -> int:
    return place if known is None else min(known, place)


def _is_plain(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, str) and content == content.strip() != "" and not message.get("tool_calls")
