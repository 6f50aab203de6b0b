"""Where assistant messages stand in a rendered conversation, for templates without generation tags."""

import logging
from collections.abc import Sequence

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.marks import Marks, find_marks
from dspark_store.sources.memory import GAPS_KEPT, LONGEST_GAP, known_places, learn_edges
from dspark_store.sources.messages import Message
from dspark_store.sources.reasoning import REASONING_FIELDS
from dspark_store.sources.rendering import Renderer, Span
from dspark_store.sources.source import SourceError

logger = logging.getLogger(__name__)


def assistant_spans(
    renderer: Renderer,
    messages: Sequence[Message],
    tools: list[JsonValue] | None,
    text: str,
    *,
    mask_headers: bool = False,
) -> list[Span]:
    """Return the stretches [start, stop) of `text` that assistant messages are.

    A message goes from the end of the text before it to the end of its own: its role header and what closes it are
    part of it. Without headers it begins behind what the template writes to prompt a generation or, where the
    template has no such prompt, at the content.

    Raises:
        SourceError: a message cannot be located.

    """
    turns = _Turns(renderer, messages, tools, text)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            start, stop = turns.boundary(index), turns.boundary(index + 1)
            spans.append((turns.header_end(index, start) if mask_headers else start, stop))
    turns.learn()
    return spans


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


class _Turns:
    """The boundaries between the messages of one rendered conversation."""

    def __init__(
        self,
        renderer: Renderer,
        messages: Sequence[Message],
        tools: list[JsonValue] | None,
        text: str,
        *,
        probing: bool = False,
    ) -> None:
        self._probing = probing
        self._renderer = renderer
        self._messages = messages
        self._tools = tools
        self._text = text
        self._prompt = renderer.generation_prompt
        self._memory = renderer.memory
        self._marks = known_places(self._memory, messages, text) or self._marks_of(messages, text)
        self._known: dict[int, int] = {len(messages): len(text)}

    def boundary(self, index: int) -> int:
        """Return where message `index` begins and the one before it ends."""
        if index not in self._known:
            self._known[index] = self._boundary(index) if index else self._beginning()
        return self._known[index]

    def learn(self) -> None:
        """Keep what stands around the contents for the next conversations."""
        learn_edges(self._memory, self._messages, self._text, self._marks)

    def content_start(self, index: int) -> int | None:
        """Return where the content of a message begins, if it is known."""
        return self._marks.starts[index]

    def header_end(self, index: int, start: int) -> int:
        """Return where the header of the message that begins at `start` ends."""
        if self._prompt and self._text.startswith(self._prompt, start):
            return start + len(self._prompt)
        content = self._marks.starts[index]
        return start if content is None else content

    def _beginning(self) -> int:
        """Return where a first message of the assistant begins: what opens every text is no part of it."""
        return max(self._text.find(self._prompt), 0)

    def _boundary(self, index: int) -> int:
        """Return the boundary, without a render if what stands between the two contents tells it.

        That is the prompt, where the assistant follows, or what was found in a conversation before.
        """
        before, after = self._marks.stops[index - 1], self._marks.starts[index]
        if before is None or after is None:
            return self._located(index)
        roles = str(self._messages[index - 1]["role"]), str(self._messages[index]["role"])
        gaps = self._memory.gaps.setdefault(roles, {})
        gap = self._text[before:after]
        if gap in gaps:
            return before + gaps[gap]
        prompted = bool(self._prompt) and roles[1] == "assistant" and self._prompt in gap
        boundary = before + gap.index(self._prompt) if prompted else self._located(index)
        is_short = len(gap) <= LONGEST_GAP and len(gaps) < GAPS_KEPT
        if is_short and before <= boundary <= after and not _has_reasoning(self._messages[index]):
            gaps[gap] = boundary - before
        return boundary

    def _located(self, index: int) -> int:
        """Return the boundary by rendering only the messages before it."""
        first = list(self._messages[:index])
        for messages in (first, _without_reasoning(first)):
            try:
                prefix = self._render(messages)
            except SourceError:
                break
            boundary = shared_prefix_length(prefix, self._text, self._renderer.eos_token)
            boundary = self._by_tail(messages, prefix) if boundary is None else boundary
            if boundary is not None:
                return boundary
        boundary = self._by_header(index)
        if boundary is not None:
            return boundary
        raise SourceError(
            f"the chat template rewrites earlier turns: the text of the first {index} messages alone is not found in "
            "that of the whole conversation, so its assistant messages cannot be located; use a template with "
            "{% generation %} tags"
        )

    def _by_tail(self, messages: Sequence[Message], prefix: str) -> int | None:
        """Return the boundary where the text before differs, by what follows the last content that both have."""
        marks = self._marks_of(messages, prefix)
        for index in reversed(range(len(messages))):
            own, whole = marks.stops[index], self._marks.stops[index]
            if own is not None and whole is not None:
                length = shared_prefix_length(prefix[own:], self._text[whole:], self._renderer.eos_token)
                return None if length is None else whole + length
        return None

    def _by_header(self, index: int) -> int | None:
        """Return the boundary where the text before differs, by the header of the message behind it."""
        roles = str(self._messages[index - 1]["role"]), str(self._messages[index]["role"])
        before, content = self._marks.stops[index - 1], self._marks.starts[index]
        if roles[1] == "assistant" and self._prompt and before is not None:
            boundary = self._text.find(self._prompt, before, content)
            if boundary >= 0:
                return boundary
        if content is None or self._probing:
            return None
        header = _probed_header(self._renderer, *roles, self._tools)
        return content - len(header) if header and self._text.endswith(header, 0, content) else None

    def _marks_of(self, messages: Sequence[Message], text: str) -> Marks:
        return find_marks(self._render, messages, text)

    def _render(self, messages: Sequence[Message]) -> str:
        return self._renderer.render(messages, self._tools)


_CALL: JsonValue = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_PROBES: dict[str, Message] = {
    "user": {"role": "user", "content": "a"},
    "assistant": {"role": "assistant", "content": "b", "tool_calls": [_CALL]},
    "tool": {"role": "tool", "content": "c", "tool_call_id": "call_0"},
}


_BEFORE = {"user": ["user"], "assistant": ["user", "assistant"], "tool": ["user", "assistant", "tool"]}


def _probed_header(renderer: Renderer, first: str, second: str, tools: list[JsonValue] | None) -> str:
    """Return what the template writes before the content of a message of the second role behind one of the first.

    It is found in a conversation made for it; "" if the template takes none or it is not found there either.
    """
    headers, key = renderer.memory.headers, (first, second, bool(tools))
    if key not in headers:
        messages = [dict(_PROBES[role]) for role in [*_BEFORE.get(first, []), second] if role in _PROBES]
        if "tool" not in (first, second):
            messages = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
        headers[key] = ""
        try:
            text = renderer.render(messages, tools)
            turns = _Turns(renderer, messages, tools, text, probing=True)
            start, content = turns.boundary(len(messages) - 1), turns.content_start(len(messages) - 1)
            headers[key] = text[start : content or start]
        except SourceError:
            logger.debug("the chat template takes no %s message behind one of the %s", second, first)
    return headers[key]


def _has_reasoning(message: Message) -> bool:
    return any(message.get(field) for field in REASONING_FIELDS)


def _without_reasoning(messages: Sequence[Message]) -> list[Message]:
    return [{key: value for key, value in message.items() if key not in REASONING_FIELDS} for message in messages]
