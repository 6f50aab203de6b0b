"""The loss mask: which tokens of a conversation the assistant said."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.marks import Span
from dspark_store.sources.messages import Conversation, Message
from dspark_store.sources.options import DEFAULT_OPTIONS, ChatOptions
from dspark_store.sources.reasoning import Stretch, has_reasoning, reasoning_stretches
from dspark_store.sources.rendering import Renderer, Rendering, Tokens
from dspark_store.sources.source import SourceError
from dspark_store.sources.turns import Turns

if TYPE_CHECKING:
    from tokenizers import Encoding


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a conversation, and the stretches of it that are supervised, and those inside them that are not."""

    text: str
    supervised: list[Span]
    masked: list[Span | Stretch]
    warnings: list[str]


def render_with_spans(renderer: Renderer, conversation: Conversation, options: ChatOptions) -> Rendered:
    """Render a conversation and find what the assistant said.

    With a template that has generation tags, what stands inside them is supervised. With any other, each assistant
    message is, from the end of the text before it to the end of its own text: its header and closing too. It is found
    by marks in a second render where the template leaves them alone, else by renders of the first messages.

    Raises:
        SourceError: the template refuses the conversation, or an assistant message cannot be located.

    """
    messages = renderer.prepare(conversation.messages)
    tools, variables = conversation.tools, conversation.template_kwargs
    answers = zip(conversation.messages, conversation.supervised, strict=True)
    flags = iter([flag for message, flag in answers if message["role"] == "assistant"])  # others may be folded
    wanted = [message["role"] == "assistant" and next(flags) for message in messages]
    said = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    unwanted = [index for index in said if not wanted[index]]
    cut_off = not conversation.ended and said[-1:] == [len(messages) - 1]
    tagged = renderer.supervises_by_tags(tools)
    supervised: list[Span] = []
    text = renderer.render(messages, tools, variables, tagged=supervised if tagged else None)
    find_reasoning = options.mask_reasoning_content and any(map(has_reasoning, messages))
    find_prompts = options.mask_generation_prompt
    if not said or (tagged and not (unwanted or cut_off or find_reasoning or find_prompts)):
        return Rendered(text, supervised, [], [])

    _probe(renderer, tools, variables)
    turns = Turns(Rendering(renderer, messages, tools, variables, text), needs_marks=find_reasoning or cut_off)
    if not tagged:
        supervised = [turns.span_said(index, options.mask_headers) for index in said if wanted[index]]
    masked: list[Span | Stretch] = [turns.span(index) for index in unwanted] if tagged else []
    if find_prompts:
        masked += [turns.prompt_span(index) for index in said if wanted[index]]
    warnings: list[str] = []
    if cut_off:
        masked.append((turns.closing(), len(text)))
    if find_reasoning:
        stretches, warnings = reasoning_stretches(turns, supervised if tagged else None)
        masked += stretches
    return Rendered(text, supervised, masked, warnings)


def loss_mask(renderer: Renderer, rendered: Rendered, tokens: Tokens) -> NDArray[np.uint8]:
    """Return the mask of the text's tokens, uint8, shape (length,).

    A token that is partly in a stretch counts as in it, for what is supervised as for what is masked.
    """
    mask = tokens_in_spans(renderer, rendered.text, tokens, rendered.supervised)
    if rendered.masked:
        is_edge = _edges(tokens)
        masked = [item.span(is_edge) if isinstance(item, Stretch) else item for item in rendered.masked]
        mask &= ~tokens_in_spans(renderer, rendered.text, tokens, masked)
    return mask.view(np.uint8)


def tokens_and_mask(
    renderer: Renderer, conversation: Conversation, options: ChatOptions = DEFAULT_OPTIONS
) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Return the ids and the loss mask of a whole conversation, not truncated; SourceError as `render_with_spans`."""
    rendered = render_with_spans(renderer, conversation, options)
    (tokens,) = renderer.tokenise([rendered.text])
    return tokens.ids, loss_mask(renderer, rendered, tokens)


def tokens_in_spans(renderer: Renderer, text: str, tokens: Tokens, spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Return which tokens hold any part of the given stretches of the text: bool, shape (length,)."""
    inside = np.zeros(len(tokens.ids), dtype=np.bool_)
    if tokens.encoding is not None and len(spans) > _FEW:
        _mark_many(inside, tokens.encoding, spans)
        return inside
    for start, stop in spans:
        if tokens.encoding is not None:
            _mark(inside, tokens.encoding, start, stop)
        else:
            head, tail = renderer.tokenise([text[:start], text[stop:]])
            before, after = _shared(tokens.ids, head.ids), _shared(tokens.ids[::-1], tail.ids[::-1])
            inside[before : len(inside) - after] = True
    return inside


_CALL: JsonValue = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
_TOOL: JsonValue = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_PROBES = ("uauaua", "suaua", "uaaua", "aua", "uctauctta")


def _probe(renderer: Renderer, tools: list[JsonValue] | None, template_kwargs: Mapping[str, JsonValue] | None) -> None:
    """Learn how the template puts messages together, once, from conversations that are always the same."""
    known = renderer.use(tools, template_kwargs)
    if known.is_probed:
        return
    known.is_probed = True
    for roles in _PROBES:
        chat = [_probing(role, f"w{number}") for number, role in enumerate(roles)]
        messages, offered = renderer.prepare(chat), [_TOOL] if tools else None
        try:
            text = renderer.render(messages, offered, template_kwargs)
            rendering = Rendering(renderer, messages, offered, template_kwargs, text)
            rendering.memory = known
            Turns(rendering, needs_marks=True).learn()
        except SourceError:
            continue  # a template need not take them all


def _probing(role: str, content: str) -> Message:
    if role == "c":
        return {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    message: Message = {"role": {"u": "user", "a": "assistant", "s": "system", "t": "tool"}[role], "content": content}
    return {**message, "tool_call_id": "call_0"} if role == "t" else message


def _edges(tokens: Tokens) -> Callable[[int], bool] | None:
    """Return what tells whether a place is in no token, or at the edge of one."""
    encoding = tokens.encoding
    if encoding is None:
        return None

    def is_edge(place: int) -> bool:
        token = encoding.char_to_token(place)
        span = None if token is None else encoding.token_to_chars(token)
        return span is None or span[0] == place

    return is_edge


_FEW = 8  # stretches that are looked up one by one


def _mark_many(inside: NDArray[np.bool_], encoding: "Encoding", spans: Sequence[Span]) -> None:
    """Mark the tokens of many stretches."""
    offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    ends = np.maximum.accumulate(offsets[:, 1])
    starts = np.minimum.accumulate(_extents(offsets[:, 0], offsets[:, 1])[::-1])[::-1]
    for start, stop in spans:
        inside[np.searchsorted(ends, start, "right") : np.searchsorted(starts, stop, "left")] |= start < stop


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


def _shared(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    count = min(len(left), len(right))
    differing = np.flatnonzero(left[:count] != right[:count])
    return int(differing[0]) if len(differing) else count
