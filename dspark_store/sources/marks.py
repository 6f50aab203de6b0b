"""Where the contents of messages stand in a rendered conversation."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dspark_store.sources.messages import Message

# A plane of private use: no template strips, cuts or capitalises its characters. Two of them mark a message.
_FIRST, _LAST = 0xF0000, 0xFFFFD
_MARK = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]")


@dataclass(frozen=True, slots=True)
class Marks:
    """For each message, where in the text its content begins and ends; None where the template leaves that edge out.

    A content without text has no place. White space around a content counts as content before it, if the text has
    it, and not behind it.
    """

    starts: list[int | None]
    stops: list[int | None]


def find_marks(render: Callable[[Sequence[Message]], str], messages: Sequence[Message], text: str) -> Marks:
    """Render the messages once more with a mark at each edge of each content, and return where the marks are.

    Nothing is known (all None) if the marks change the render otherwise, as in a template that measures contents.

    Args:
        render: messages to text.
        messages: the conversation.
        text: its render.

    """
    starts: list[int | None] = [None] * len(messages)
    stops: list[int | None] = [None] * len(messages)
    unknown = Marks(starts, stops)
    if 2 * len(messages) > _LAST - _FIRST or _MARK.search(text):
        return unknown
    marked = render([_marked(message, index) for index, message in enumerate(messages)])
    if _MARK.sub("", marked) != text:
        return unknown
    found: dict[int, list[int]] = {}
    for count, match in enumerate(_MARK.finditer(marked)):
        found.setdefault(ord(match[0]) - _FIRST, []).append(match.start() - count)
    edges = {mark: places[0] for mark, places in found.items() if len(places) == 1}
    for index, message in enumerate(messages):
        start, lead = edges.get(2 * index), _parts(message)[0]
        if start is not None:
            starts[index] = start - len(lead) if lead and text.endswith(lead, 0, start) else start
        stops[index] = edges.get(2 * index + 1)
    return Marks(starts, stops)


def _marked(message: Message, index: int) -> Message:
    lead, core, trail = _parts(message)
    if not core:
        return message
    return {**message, "content": f"{lead}{chr(_FIRST + 2 * index)}{core}{chr(_FIRST + 2 * index + 1)}{trail}"}


def _parts(message: Message) -> tuple[str, str, str]:
    """Return a message's content as white space, the rest and white space."""
    content = str(message["content"])
    core = content.strip()
    start = content.index(core)
    return content[:start], core, content[start + len(core) :]
