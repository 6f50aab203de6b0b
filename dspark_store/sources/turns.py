"""Where messages stand in a rendered conversation, for templates without generation tags."""

from collections.abc import Sequence

from dspark_store.sources.marks import CALL, CONTENT, KINDS, REASONING_FIELDS, MarkedText, Marking, Span, content_pieces
from dspark_store.sources.messages import Message
from dspark_store.sources.rendering import Rendering, RenderLimitError
from dspark_store.sources.seams import Explained, Roles, TemplateMemory, learn_edges
from dspark_store.sources.source import SourceError


def boundary_by_prefix(rendering: Rendering, index: int) -> int:
    """Return where the first `index` messages end in the text, by rendering only them.

    Raises:
        SourceError: the template rewrites them when others follow, or there were too many renders.

    """
    first = list(rendering.messages[:index])
    for messages in (first, _without_reasoning(first)):
        try:
            prefix = rendering.render(messages)
        except RenderLimitError:
            raise
        except SourceError:
            break
        boundary = shared_prefix_length(prefix, rendering.text, rendering.renderer.eos_token)
        if boundary is not None:
            return boundary
    raise SourceError(
        f"the chat template rewrites earlier turns: the text of the first {index} messages alone is not found in "
        "that of the whole conversation, so its assistant messages cannot be located; use a template with "
        "{% generation %} tags"
    )


class PrefixTurns:
    """The boundaries between the messages of one conversation whose render cannot be explained by marks."""

    def __init__(self, rendering: Rendering) -> None:
        """Take the conversation; RenderLimitError if it surely needs too many renders."""
        self._rendering = rendering
        self._known: dict[int, int] = {len(rendering.messages): len(rendering.text)}
        said = [index for index, message in enumerate(rendering.messages) if message["role"] == "assistant"]
        rendering.expect(len({*said, *(index + 1 for index in said)} - {0, len(rendering.messages)}))

    def boundary(self, index: int) -> int:
        """Return where message `index` begins and the one before it ends."""
        if index not in self._known:
            places = (self._rendering.text.find(prompt) for prompt in self._rendering.prompts)
            first = next((place for place in places if place >= 0), 0)
            self._known[index] = boundary_by_prefix(self._rendering, index) if index else first
        return self._known[index]

    def header_end(self, index: int) -> int:
        """Return where the header of an assistant message ends: at its beginning, if the template has no prompt."""
        start = self.boundary(index)
        ends = (
            start + len(prompt) for prompt in self._rendering.prompts if self._rendering.text.startswith(prompt, start)
        )
        return next(ends, start)

    def learn(self) -> None:
        """Keep nothing."""


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


def _without_reasoning(messages: Sequence[Message]) -> list[Message]:
    return [{key: value for key, value in message.items() if key not in REASONING_FIELDS} for message in messages]


class Places:
    """Where what the messages hold stands in the text, as far as it is known.

    Attributes:
        starts: of each message; what stands before its mark and is its own counts, where the text has it.
        stops: of each message; white space behind the mark does not count.
        openings: of each message, without calls.
        said: of each content that is no reasoning.
        contents: of each message whose content is plain text without white space around it.

    """

    def __init__(self, messages: Sequence[Message], text: str) -> None:
        """Know nothing of any message."""
        self.kinds: Sequence[str] = KINDS
        self.starts: list[int | None] = [None] * len(messages)
        self.stops: list[int | None] = [None] * len(messages)
        self.openings: list[int | None] = [None] * len(messages)
        self.said: list[int | None] = [None] * len(messages)
        self.contents: list[Span | None] = [None] * len(messages)
        self._messages = messages
        self._text = text

    def explained(self, contents: Sequence[Span]) -> "Places":
        """Take the places from what is known of the template."""
        self.starts[:] = self.openings[:] = [start for start, _ in contents]
        self.stops[:] = [stop for _, stop in contents]
        self.contents[:] = contents
        return self

    def marked(self, marking: Marking, found: MarkedText) -> "Places":
        """Take the places from marks."""
        self.kinds = marking.kinds
        for number, (first, stop) in found.spans.items():
            index, piece = marking.marks[number].message, marking.marks[number].piece
            start = first - len(piece.before) if self._text.endswith(piece.before, 0, first) else first
            known, last = self.starts[index], self.stops[index]
            self.starts[index] = start if known is None else min(known, start)
            self.stops[index] = stop if last is None else max(last, stop)
            if piece.kind != CALL:
                opening = self.openings[index]
                self.openings[index] = start if opening is None else min(opening, start)
            if piece.kind == CONTENT:
                said = self.said[index]
                self.said[index] = start if said is None else min(said, start)
            if piece.kind == CONTENT and self._plain(index) and stop - start == len(piece.core):
                self.contents[index] = start, stop
        return self

    def _plain(self, index: int) -> bool:
        message = self._messages[index]
        content = message.get("content")
        return isinstance(content, str) and content == content.strip() != "" and not message.get("tool_calls")


class MarkedTurns:
    """The boundaries between the messages of one conversation, found by marks in one render of it.

    What the marks leave open, which is how a message ends, is looked for in renders of the first messages: once for
    each way that a template has of putting two messages together.
    """

    def __init__(self, rendering: Rendering, places: Places, explained: Explained | None = None) -> None:
        """Take what is known."""
        self._rendering = rendering
        self._messages = rendering.messages
        self._text = rendering.text
        self._memory: TemplateMemory = rendering.memory
        self._prompts = rendering.prompts
        self._places = places
        self._known: dict[int, int] = {len(self._messages): len(self._text)}
        if explained is not None:
            self._known.update(explained.boundaries)

    def boundary(self, index: int) -> int:
        """Return where message `index` begins and the one before it ends."""
        if index not in self._known:
            self._known[index] = self._boundary(index) if index else self._beginning()
        return self._known[index]

    def header_end(self, index: int) -> int:
        """Return where the header of an assistant message ends."""
        start = self.boundary(index)
        for prompt in self._prompts:
            if self._text.startswith(prompt, start):
                return start + len(prompt)
        opening = self._places.openings[index]
        return start if opening is None else max(start, opening)

    def learn(self) -> None:
        """Keep what stands around the contents for the next conversations."""
        learn_edges(self._memory, self._messages, self._text, self._places.contents, self._known)

    def _beginning(self) -> int:
        """Return where a first message of the assistant begins: what opens every text is no part of it."""
        return self._prompted(0, len(self._text)) or 0

    def _boundary(self, index: int) -> int:
        roles = self._roles(index)
        anchor = self._anchor(index)
        right = self._places.starts[index]
        if anchor is None:
            return boundary_by_prefix(self._rendering, index)
        left = self._places.stops[anchor] or 0
        if roles[1] == "assistant":
            place = self._prompted(left, self._limit(index, left), follows_call=self._has_calls(index - 1))
            if place is not None:
                return place
        if right is not None and right >= left:
            back = self._memory.seam(roles, self._text[left:right])
            if back is not None:
                return right - back
        boundary = self._located(index, anchor, left)
        whole = anchor == index - 1 and not self._has_calls(anchor)
        if right is not None and left <= boundary <= right and anchor == index - 1:
            closing = self._text[left:boundary]
            self._memory.learn_seam(roles, closing, self._text[boundary:right], whole=whole and self._is_bare(anchor))
        return boundary

    def _located(self, index: int, anchor: int, left: int) -> int:
        """Return the boundary by what closes the first messages when nothing follows."""
        tail = self._tail(self._messages[:index], anchor)
        rest = self._text[left:]
        if tail is not None and rest.startswith(tail) and not self._closes_with_nothing(index - 1, tail):
            return left + len(tail)
        closing = self._closing(index, anchor, left)
        if closing is not None:
            return left + closing
        length = None if tail is None else shared_prefix_length(tail, rest, self._rendering.renderer.eos_token)
        if length is not None:
            return left + length
        try:
            return boundary_by_prefix(self._rendering, index)
        except RenderLimitError:
            raise
        except SourceError:
            is_said = self._messages[index]["role"] == "assistant"
            place = self._prompted(left, len(self._text)) if is_said else None
            if place is None:
                raise
            return place

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
        right = self._places.starts[index]
        prompted = bool(self._prompts) and self._messages[index]["role"] == "assistant"
        opening = None if prompted else self._opening(self._messages[index])
        if opening is None or right is None or right < left:
            return None
        gap = self._text[left:right]
        size = 0
        while size < min(len(gap), len(opening)) and gap[-1 - size] == opening[-1 - size]:
            size += 1
        renderer = self._rendering.renderer
        size = min(len(piece) - renderer.whole_special_tokens(piece, len(piece) - size) for piece in (gap, opening))
        is_header = size == len(opening) or renderer.ends_special(opening[: len(opening) - size])
        return len(gap) - size if size and is_header else None

    def _opening(self, message: Message) -> str | None:
        """Return what the template writes before a message that is the only one."""
        marking = Marking([message], self._places.kinds)
        found = self._read(marking)
        start = None if found is None else Places([message], found.text).marked(marking, found).starts[0]
        return None if found is None or start is None else found.text[:start]

    def _tail(self, messages: Sequence[Message], anchor: int) -> str | None:
        """Return what stands behind a message when only these are rendered; None if that cannot be told."""
        marking = Marking(messages, self._places.kinds)
        found = self._read(marking)
        stops = (
            []
            if found is None
            else [span[1] for number, span in found.spans.items() if marking.marks[number].message == anchor]
        )
        return found.text[max(stops) :] if found is not None and stops else None

    def _read(self, marking: Marking) -> MarkedText | None:
        try:
            return marking.read(self._rendering.render(marking.messages()))
        except RenderLimitError:
            raise
        except SourceError:
            return None

    def _prompted(self, left: int, limit: int, *, follows_call: bool = False) -> int | None:
        """Return where the prompt of an assistant stands between two places: the last, if arguments may hold one."""
        find = str.rfind if follows_call else str.find
        for prompt in self._prompts:
            place = find(self._text, prompt, left, limit)
            if place >= 0:
                return place
        return None

    def _anchor(self, index: int) -> int | None:
        """Return the last message before one whose end is known."""
        return next((before for before in reversed(range(index)) if self._places.stops[before] is not None), None)

    def _limit(self, index: int, left: int) -> int:
        """Return where the first thing stands that is known of a message or of those behind it."""
        starts = (start for start in self._places.starts[index:] if start is not None and start >= left)
        return next(starts, len(self._text))

    def _roles(self, index: int) -> Roles:
        return str(self._messages[index - 1]["role"]), str(self._messages[index]["role"])

    def _has_calls(self, index: int) -> bool:
        return bool(self._messages[index].get("tool_calls"))

    def _closes_with_nothing(self, index: int, tail: str) -> bool:
        behind = content_pieces(self._messages[index])[-1].after
        return tail in ("", behind, behind.rstrip())

    def _is_bare(self, index: int) -> bool:
        return not content_pieces(self._messages[index])[-1].after
