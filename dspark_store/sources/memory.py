"""Finding contents in a rendered conversation by what the template wrote around those of conversations before."""

from collections.abc import Sequence

from dspark_store.sources.marks import Marks
from dspark_store.sources.messages import Message
from dspark_store.sources.rendering import TemplateMemory

LONGEST_GAP = 256
GAPS_KEPT = 16  # of the same two roles


def known_places(memory: TemplateMemory, messages: Sequence[Message], text: str) -> Marks | None:
    """Return the places of all contents, or None unless known pieces and the contents alone make up the whole text.

    No render is needed for it. Contents that are empty, or have white space around them, are left to `find_marks`, and
    so are texts in which two known pieces would fit.
    """
    position = _after(text, 0, memory.openings.get(str(messages[0]["role"])))
    places: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        content = str(message["content"])
        if position is None or not content or content != content.strip() or not text.startswith(content, position):
            return None
        stop = position + len(content)
        places.append((position, stop))
        if index + 1 < len(messages):
            following = messages[index + 1]
            known = memory.gaps.get((str(message["role"]), str(following["role"])), {})
            content = str(following["content"])
            fitting = [gap for gap in known if text.startswith(gap, stop) and text.startswith(content, stop + len(gap))]
            position = stop + len(fitting[0]) if len(fitting) == 1 else None
    closing = memory.closings.get(str(messages[-1]["role"]))
    if closing is None or text[places[-1][1] :] != closing:
        return None
    return Marks([start for start, _ in places], [stop for _, stop in places])


def learn_edges(memory: TemplateMemory, messages: Sequence[Message], text: str, marks: Marks) -> None:
    """Keep what stands before the first content and behind the last one, if no other is kept for their roles yet."""
    first, last = marks.starts[0], marks.stops[-1]
    if first is not None and first <= LONGEST_GAP:
        memory.openings.setdefault(str(messages[0]["role"]), text[:first])
    if last is not None and len(text) - last <= LONGEST_GAP:
        memory.closings.setdefault(str(messages[-1]["role"]), text[last:])


def _after(text: str, position: int, piece: str | None) -> int | None:
    if piece is None or not text.startswith(piece, position):
        return None
    return position + len(piece)
