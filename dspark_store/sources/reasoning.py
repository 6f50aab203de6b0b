"""Where the reasoning of assistant messages stands in a rendered conversation."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dspark_store.sources.messages import Message
from dspark_store.sources.rendering import Renderer, Span, Tokens

if TYPE_CHECKING:
    from tokenizers import Encoding

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # transformers takes each for the others


def reasoning_spans(
    render: Callable[[Sequence[Message]], str],
    messages: Sequence[Message],
    text: str,
    warn: Callable[[str], None] = lambda _: None,
) -> list[Span]:
    """Return the stretches [start, stop) of `text` that hold the reasoning of assistant messages.

    Each message is rendered twice more: with a marker for its reasoning, which gives the exact place, and without
    reasoning, which shows what vanishes along with it (delimiters; they belong to the stretch).

    Args:
        render: messages to text.
        messages: the conversation.
        text: its render.
        warn: told of each message whose reasoning the template leaves out.

    """
    marker = "\ue000\ue001"  # of private use: no template strips, cuts or capitalises them
    while marker in text:
        marker += "\ue001"
    spans = []
    for index, message in enumerate(messages):
        fields = [field for field in REASONING_FIELDS if isinstance(message.get(field), str) and message[field]]
        if message["role"] != "assistant" or not fields:
            continue

        def replaced(reasoning: str, index: int = index, fields: list[str] = fields) -> str:
            changed: Message = {**messages[index], **dict.fromkeys(fields, reasoning)}
            return render([*messages[:index], changed, *messages[index + 1 :]])

        span = removed_span(text, replaced(""), _marked_span(text, replaced(marker), marker))
        if span is None:
            warn(f"the chat template does not render the reasoning of message {index}")
        else:
            spans.append(span)
    return spans


def removed_span(text: str, without: str, core: Span | None) -> Span | None:
    """Return the stretch of `text` that is missing from `without`, or None if there is none.

    Args:
        text: the original.
        without: the original after something was taken out.
        core: what the stretch must contain, if known. It decides where two equal pieces of text leave open which of
            them went ("a b b c" and "a b c"); what it leaves open is decided for the later start.

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
    if missing > 0 and max(core[1] - missing, len(without) - tail) <= latest:
        return latest, latest + missing
    stop = max(core[1], len(text) - min(tail, len(without) - latest))
    return (latest, stop) if latest < stop else None


def tokens_in_spans(renderer: Renderer, text: str, tokens: Tokens, spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Return which tokens hold any part of the given stretches of the text: bool, shape (length,)."""
    inside = np.zeros(len(tokens.ids), dtype=np.bool_)
    for start, stop in spans:
        if tokens.encoding is not None:
            _mark(inside, tokens.encoding, start, stop)
        else:
            head, tail = renderer.tokenise([text[:start], text[stop:]])
            before, after = _shared(tokens.ids, head.ids), _shared(tokens.ids[::-1], tail.ids[::-1])
            inside[before : len(inside) - after] = True
    return inside


def _mark(inside: NDArray[np.bool_], encoding: "Encoding", start: int, stop: int) -> None:
    """Mark the tokens of [start, stop), without looking at any others if both edges are in tokens."""
    first = encoding.char_to_token(start) if start < stop else None
    last = encoding.char_to_token(stop - 1) if start < stop else None
    if first is None or last is None:
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        starts, ends = offsets[:, 0], offsets[:, 1]
        inside |= (_extents(starts, ends) < stop) & (ends > start)
        return
    end = last + 1
    previous = stop
    while end < len(inside):  # the other tokens of a character that is several, and empty tokens
        begins, ends_at = encoding.token_to_chars(end) or (stop, stop)
        if (min(begins, previous) if begins == ends_at else begins) >= stop:
            break
        previous = ends_at
        end += 1
    inside[first:end] = True


def _extents(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the starts, those of empty tokens moved back to the end of the token before.

    Tokenizers that trim spaces off their offsets report a token of spaces as empty, at its end.
    """
    before = np.concatenate(([0], ends[:-1]))
    return np.where(starts == ends, np.minimum(starts, before), starts)


def _marked_span(text: str, marked: str, marker: str) -> Span | None:
    """Return where `text` has what the marker stands for, or None if `marked` differs in more than that."""
    if marked.count(marker) != 1:
        return None
    head, tail = marked.split(marker)
    if len(head) + len(tail) > len(text) or not (text.startswith(head) and text.endswith(tail)):
        return None
    return len(head), len(text) - len(tail)


def _common_prefix_length(left: str, right: str) -> int:
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _shared(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    count = min(len(left), len(right))
    differing = np.flatnonzero(left[:count] != right[:count])
    return int(differing[0]) if len(differing) else count
