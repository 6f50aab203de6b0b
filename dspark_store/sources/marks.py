"""A conversation with private-use characters around what its messages hold, and where a render has them."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.messages import Message

type Span = tuple[int, int]

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # transformers takes each for the others
CONTENT, REASONING, CALL = "content", "reasoning", "call"
KINDS = (CONTENT, REASONING, CALL)

# Planes of private use: no template strips, cuts or capitalises their characters. Two of them make a mark.
_FIRST, _LAST = 0xF0000, 0x10FFFD
_MARK = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]")
_THINKING = re.compile(r"<think>(.*?)</think>\s*", re.DOTALL)
_TAGS = r"\s*(?:<[^<>\s]{1,64}>\s*)*"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a content: what is marked of it, and what stands before and behind that.

    White space stays outside of a mark, since templates strip it; so do tags around what users and tools say, since
    templates look for them there.
    """

    kind: str
    before: str
    core: str
    after: str

    @property
    def text(self) -> str:
        """The whole piece."""
        return self.before + self.core + self.after


@dataclass(frozen=True, slots=True)
class Mark:
    """What one mark stands around: a piece of a message."""

    message: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A render of a marked conversation: its text without the marks, and where each mark was, in order.

    `spans` holds (start, stop) of each mark that is there once; of the name of a call, its first.
    """

    text: str
    spans: dict[int, Span]


class Marking:
    """Marks for the contents, the reasoning and the calls of a conversation.

    Attributes:
        marks: what each mark stands around, by its number.
        size: the messages.
        kinds: what is marked.

    """

    def __init__(self, messages: Sequence[Message], kinds: Sequence[str] = KINDS) -> None:
        """Choose the places.

        Args:
            messages: the conversation.
            kinds: what to mark; with calls, contents without text are marked too.

        """
        self._messages = messages
        self.kinds = kinds
        self.size = len(messages)
        self.marks: list[Mark] = []
        self._contents: list[list[tuple[Piece, int | None]]] = []
        self._fields: list[list[tuple[str, Piece, int]]] = []
        self._calls: list[list[int]] = []
        for index, message in enumerate(messages):
            self._choose(index, message)
        self.fits = 2 * len(self.marks) <= _LAST - _FIRST

    def messages(self) -> list[Message]:
        """Return the messages with marks."""
        return [self._marked(index) for index in range(self.size)]

    def without_reasoning(self, *, emptied: bool = False) -> list[Message]:
        """Return the messages with marks and without any reasoning: its fields are left out, or empty if so wanted.

        They are empty in any case where the content has tags that a template may look at for want of a field.
        """
        messages = [self._marked(index, reasoning=False) for index in range(self.size)]
        for message, fields in zip(messages, self._fields, strict=True):
            empty = emptied or "think>" in str(message.get("content"))
            for field, _, _ in fields:
                message.pop(field)
            message |= {field: "" for field, _, _ in fields if empty}
        return messages

    def read(self, marked: str) -> MarkedText:
        """Take the marks out of a render."""
        edges: dict[int, list[int]] = {}
        for found, match in enumerate(_MARK.finditer(marked)):
            edges.setdefault(ord(match[0]) - _FIRST, []).append(match.start() - found)
        spans = {}
        for number, mark in enumerate(self.marks):
            starts, stops = edges.get(2 * number, []), edges.get(2 * number + 1, [])
            once = len(starts) == len(stops) == 1 or mark.piece.kind == CALL
            if once and starts and stops and starts[0] <= stops[0]:
                spans[number] = starts[0], stops[0]
        return MarkedText(_MARK.sub("", marked), spans)

    def _choose(self, index: int, message: Message) -> None:
        pieces = content_pieces(message)
        has_calls = bool(message.get("tool_calls"))
        chosen: list[tuple[Piece, int | None]] = []
        for piece in pieces:
            empty_too = CALL in self.kinds and len(pieces) == 1 and not has_calls and "content" in message
            wanted = piece.kind in self.kinds and (piece.core or empty_too)
            chosen.append((piece, self._number(index, piece) if wanted else None))
        self._contents.append(chosen)
        # All names that a template may know the same reasoning by get the same mark.
        fields = [field for field in REASONING_FIELDS if REASONING in self.kinds and is_reasoning(message, field)]
        numbers: dict[str, tuple[Piece, int]] = {}
        for field in fields:
            text = str(message[field])
            if text not in numbers:
                piece = Piece(REASONING, *_stripped(text))
                numbers[text] = piece, self._number(index, piece)
        self._fields.append([(field, *numbers[str(message[field])]) for field in fields])
        names = [_name_of(call) for call in _calls_of(message)] if CALL in self.kinds else []
        self._calls.append([self._number(index, Piece(CALL, "", name, "")) for name in names if name])

    def _number(self, index: int, piece: Piece) -> int:
        self.marks.append(Mark(index, piece))
        return len(self.marks) - 1

    def _marked(self, index: int, *, reasoning: bool = True) -> Message:
        message = dict(self._messages[index])
        if any(number is not None for _, number in self._contents[index]):
            shown = [(piece, number) for piece, number in self._contents[index] if reasoning or piece.kind == CONTENT]
            message["content"] = "".join(_around(piece, number) for piece, number in shown)
        for field, piece, number in self._fields[index]:
            message[field] = _around(piece, number)
        numbers = iter(self._calls[index])
        if self._calls[index]:
            message["tool_calls"] = [_marked_call(call, numbers) for call in _calls_of(message)]
        return message


def mark_render(
    render: Callable[[Sequence[Message]], str], messages: Sequence[Message], text: str
) -> tuple[Marking, MarkedText] | None:
    """Render the messages once more with marks, and return them and where they are.

    None if the marks change the render otherwise, as in a template that measures contents. If it is those that are
    put where no text is, the others are tried alone.
    """
    if _MARK.search(text):
        return None
    previous: list[Mark] | None = None
    for kinds in (KINDS, (CONTENT, REASONING)):
        marking = Marking(messages, kinds)
        if not marking.fits or marking.marks == previous:
            return None
        found = marking.read(render(marking.messages()))
        if found.text == text:
            return marking, found
        previous = marking.marks
    return None


def content_pieces(message: Message) -> list[Piece]:
    """Return the pieces that make up a content: of an assistant's, each block `<think>..</think>` is reasoning.

    So is what stands before a first `</think>` that nothing opens, and behind a `<think>` at the beginning that
    nothing closes. In a message that has a field for its reasoning, the content is none.
    """
    content = message.get("content")
    if not isinstance(content, str):
        return [Piece(CONTENT, "", "", "")]
    if message["role"] != "assistant":
        return [Piece(CONTENT, *_inside_tags(content))]
    pieces: list[Piece] = []
    place = 0
    apart = any(is_reasoning(message, field) for field in REASONING_FIELDS)
    for start, inner, stop in [] if apart else _thoughts(content):
        if content[place:start]:
            pieces.append(Piece(CONTENT, *_stripped(content[place:start])))
        before, core, after = _stripped(content[inner[0] : inner[1]])
        pieces.append(Piece(REASONING, content[start : inner[0]] + before, core, after + content[inner[1] : stop]))
        place = stop
    if content[place:] or not pieces:
        pieces.append(Piece(CONTENT, *_stripped(content[place:])))
    return pieces


def is_reasoning(message: Message, field: str) -> bool:
    """Tell whether a field of a message holds reasoning of the assistant."""
    return message["role"] == "assistant" and isinstance(message.get(field), str) and bool(message[field])


def _thoughts(content: str) -> list[tuple[int, Span, int]]:
    """Return the start, the inside and the end of each stretch of reasoning in a content."""
    if "think>" not in content:
        return []
    opening, closing = content.find("<think>"), content.find("</think>")
    found: list[tuple[int, Span, int]] = []
    if closing >= 0 and not 0 <= opening < closing and content[:closing].strip():
        stop = closing + len("</think>")
        stop += len(content[stop:]) - len(content[stop:].lstrip())
        found.append((0, (0, closing), stop))
    found += [
        (match.start(), match.span(1), match.end())
        for match in _THINKING.finditer(content, found[-1][2] if found else 0)
        if match[1].strip()
    ]
    if closing < 0 and not content[:opening].strip() and content[opening + len("<think>") :].strip():
        found.append((opening, (opening + len("<think>"), len(content)), len(content)))
    return found


def _around(piece: Piece, number: int | None) -> str:
    if number is None:
        return piece.text
    return f"{piece.before}{chr(_FIRST + 2 * number)}{piece.core}{chr(_FIRST + 2 * number + 1)}{piece.after}"


def _stripped(text: str) -> tuple[str, str, str]:
    core = text.strip()
    start = text.index(core) if core else len(text)
    return text[:start], core, text[start + len(core) :]


def _inside_tags(text: str) -> tuple[str, str, str]:
    before, core, after = _stripped(text)
    lead = re.match(_TAGS, core)
    inner = core[lead.end() :] if lead else core
    trail = re.search(r"(?:\s*<[^<>\s]{1,64}>)*\s*\Z", inner[-256:])
    size = len(trail[0]) if trail else 0
    inner = inner[: len(inner) - size]
    if not inner:
        return before, core, after
    start = core.index(inner, lead.end() if lead else 0)
    return before + core[:start], inner, core[start + len(inner) :] + after


def _calls_of(message: Message) -> list[JsonValue]:
    calls = message.get("tool_calls")
    return calls if message["role"] == "assistant" and isinstance(calls, list) else []


def _name_of(call: JsonValue) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _marked_call(call: JsonValue, numbers: Iterator[int]) -> JsonValue:
    name = _name_of(call)
    if not name or not isinstance(call, dict) or not isinstance(call["function"], dict):
        return call
    return {**call, "function": {**call["function"], "name": _around(Piece(CALL, "", name, ""), next(numbers))}}
