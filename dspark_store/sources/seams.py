"""What a template writes between the contents of messages: it spares renders."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dspark_store.sources.marks import Span
from dspark_store.sources.messages import Message

LONGEST = 256  # characters of a seam that is kept
KEPT = 16  # of the same two roles

type Roles = tuple[str, str]


@dataclass(slots=True)
class TemplateMemory:
    """What a template writes around contents, by roles, with the same variables, and with or without tools.

    Attributes:
        prompts: what it writes to have the assistant speak, the longest first; none if it has no such prompt.
        openings: before the first content, by its role.
        gaps: between two contents, by their roles; and where in it the first message ends, if it was looked for.
        closings: behind the last content, by its role.
        seams: what closes a message in front of each header of the next, by the roles of both.
        is_probed: whether it was learned from probes, which are the same for every source.
        base: what is known of the template beside that.

    """

    prompts: list[str]
    openings: dict[str, str] = field(default_factory=dict)
    gaps: dict[Roles, dict[str, int | None]] = field(default_factory=dict)
    closings: dict[str, str] = field(default_factory=dict)
    seams: dict[Roles, "dict[str, Closings]"] = field(default_factory=dict)
    is_probed: bool = False
    base: "TemplateMemory | None" = None

    def learn_seam(self, roles: Roles, closing: str, header: str, *, whole: bool) -> None:
        """Keep what was found between two messages.

        Args:
            roles: of both.
            closing: what stands between what is known of the first and its end.
            header: what stands between there and what is known of the second.
            whole: the closing is all that the template writes to close a message, and nothing else.

        """
        headers = self.seams.setdefault(roles, {})
        if len(header) <= LONGEST and (header in headers or len(headers) < KEPT):
            headers.setdefault(header, Closings()).learn(closing, whole=whole)

    def seam(self, roles: Roles, gap: str) -> int | None:
        """Return how far before the end of a gap the second message begins; None if that is not certain."""
        found = {
            len(header)
            for memory in (self, self.base)
            if memory is not None
            for header, closings in memory.seams.get(roles, {}).items()
            if gap.endswith(header) and closings.end(gap[: len(gap) - len(header)])
        }
        return found.pop() if len(found) == 1 else None


class Closings:
    """What stands in front of one header: whole closings, and the common end of those behind calls."""

    def __init__(self) -> None:
        """Know nothing."""
        self._whole: set[str] = set()
        self._tail: str | None = None

    def learn(self, closing: str, *, whole: bool) -> None:
        """Keep one that was found."""
        if whole and len(self._whole) < KEPT and len(closing) <= LONGEST:
            self._whole.add(closing)
        elif not whole:
            closing = closing[-LONGEST:]
            self._tail = closing if self._tail is None else common_end(self._tail, closing)

    def end(self, body: str) -> bool:
        """Tell whether a text ends with one of them: that of a call is known from two of them on."""
        if body in self._whole or any(closing.strip() and body.endswith(closing) for closing in self._whole):
            return True
        return bool(self._tail and self._tail.strip() and body.endswith(self._tail))


def explain(memory: TemplateMemory, messages: Sequence[Message], text: str) -> tuple[list[Span], dict[int, int]] | None:
    """Return where all contents are, and where each message but the first begins, as far as that was kept.

    None unless known pieces and the contents alone make up the whole text.

    No render is needed for it. Contents that are empty, or have white space around them, are left to marks, and so
    are texts in which two known pieces would fit. What opens the text, such as tools, need not be known where the first
    message is no answer.
    """
    opening = memory.openings.get(str(messages[0]["role"]))
    known = opening is not None and text.startswith(opening)
    position = len(opening or "") if known else _first_content(memory, messages, text)
    places: list[Span] = []
    boundaries: dict[int, int] = {}
    for index, message in enumerate(messages):
        content = message.get("content")
        if position is None or not isinstance(content, str) or not content or content != content.strip():
            return None
        if not text.startswith(content, position):
            return None
        stop = position + len(content)
        places.append((position, stop))
        if index + 1 < len(messages):
            following = messages[index + 1]
            gaps = memory.gaps.get((str(message["role"]), str(following["role"])), {})
            content = str(following.get("content"))
            fitting = [gap for gap in gaps if text.startswith(gap, stop) and text.startswith(content, stop + len(gap))]
            if len(fitting) != 1:
                return None
            boundary = gaps[fitting[0]]
            if boundary is not None:
                boundaries[index + 1] = stop + boundary
            position = stop + len(fitting[0])
    closing = memory.closings.get(str(messages[-1]["role"]))
    return None if closing is None or text[places[-1][1] :] != closing else (places, boundaries)


def _first_content(memory: TemplateMemory, messages: Sequence[Message], text: str) -> int | None:
    """Return where the first content begins, by what follows it; None unless there is one such place."""
    if len(messages) < 2 or messages[0]["role"] == "assistant":
        return None
    first, second = (str(message.get("content")) for message in messages[:2])
    known = memory.gaps.get((str(messages[0]["role"]), str(messages[1]["role"])), {})
    whole = [first + gap + second for gap in known]
    places = {place for piece in whole for place in (text.find(piece), text.rfind(piece)) if place >= 0}
    return places.pop() if len(places) == 1 else None


def learn_edges(
    memory: TemplateMemory,
    messages: Sequence[Message],
    text: str,
    contents: Sequence[Span | None],
    boundaries: dict[int, int],
) -> None:
    """Keep what stands before the first content, behind the last one and between two, where it is short.

    What is kept must not depend on which conversations came before, or masks would: it is learned from probes.
    """
    first, last = contents[0], contents[-1]
    if first is not None and first[0] <= LONGEST:
        memory.openings.setdefault(str(messages[0]["role"]), text[: first[0]])
    if last is not None and len(text) - last[1] <= LONGEST:
        memory.closings.setdefault(str(messages[-1]["role"]), text[last[1] :])
    for index in range(1, len(messages)):
        left, right = contents[index - 1], contents[index]
        if left is None or right is None or not left[1] <= right[0] <= left[1] + LONGEST:
            continue
        gaps = memory.gaps.setdefault((str(messages[index - 1]["role"]), str(messages[index]["role"])), {})
        if len(gaps) < KEPT:
            boundary = boundaries.get(index)
            gaps.setdefault(text[left[1] : right[0]], None if boundary is None else boundary - left[1])


def common_end(left: str, right: str) -> str:
    """Return the longest text with which both end."""
    size = 0
    while size < min(len(left), len(right)) and left[-1 - size] == right[-1 - size]:
        size += 1
    return left[len(left) - size :]
