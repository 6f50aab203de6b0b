"""The loss mask: which tokens of a conversation the assistant said."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dspark_store.sources.messages import Conversation
from dspark_store.sources.reasoning import reasoning_spans, tokens_in_spans
from dspark_store.sources.rendering import Renderer, Tokens
from dspark_store.sources.source import SourceError


def tokens_and_mask(
    renderer: Renderer, conversation: Conversation, *, mask_reasoning_content: bool = False, where: str = ""
) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Return the ids and the loss mask of a whole conversation, not truncated.

    With a template that has generation tags, what stands inside them is supervised. With any other, each assistant
    message is, from the end of the text before it to the end of its own text: its header and closing tokens too.
    A conversation without assistant messages has an all-zero mask.

    Args:
        renderer: the tokenizer and its template.
        conversation: the messages and tools.
        mask_reasoning_content: do not supervise the reasoning of assistant messages.
        where: the place of the conversation, for warnings.

    Raises:
        SourceError: the template refuses the conversation, or changes earlier messages when later ones come.

    """
    messages, tools = renderer.prepare(conversation.messages), conversation.tools
    tagged = renderer.supervises_by_tags(tools)
    text = "" if tagged and not mask_reasoning_content else renderer.render(messages, tools)
    if tagged:
        tokens, mask = renderer.tokenise_tagged(messages, tools)
    else:
        tokens = renderer.tokenise(text)
        mask = prefix_mask(renderer, Conversation(messages, tools), text, tokens)
    if mask_reasoning_content:
        spans = reasoning_spans(lambda changed: renderer.render(changed, tools), messages, text, where)
        mask[tokens_in_spans(renderer, text, tokens, spans)] = 0
    return tokens.ids, mask


def prefix_mask(renderer: Renderer, conversation: Conversation, text: str, tokens: Tokens) -> NDArray[np.uint8]:
    """Mark each assistant message: the tokens between the render without it and the render that ends with it.

    Args:
        renderer: what rendered `text` and tokenised it.
        conversation: the conversation.
        text: its render.
        tokens: the tokens of `text`.

    Returns:
        uint8, shape (length,).

    Raises:
        SourceError: the render of some first messages is no token prefix of the whole (see `shared_prefix_length`).

    """
    messages = conversation.messages
    ends = {0: 0, len(messages): len(tokens.ids)}

    def end_of(count: int) -> int:
        if count not in ends:
            prefix = renderer.render(messages[:count], conversation.tools)
            ends[count] = _prefix_end(renderer, prefix, text, tokens, count)
        return ends[count]

    mask = np.zeros(len(tokens.ids), dtype=np.uint8)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            mask[end_of(index) : end_of(index + 1)] = 1
    return mask


def shared_prefix_length(prefix: Sequence[int], full: Sequence[int], terminator: int | None) -> int | None:
    """Return how many tokens of `full` the prefix stands for, or None if it is no prefix.

    A template may close any render with a terminator (the EOS token) that the longer render does not have there, so
    the last token of a prefix of two or more may be the terminator in place of what `full` has; it is then not
    counted.
    """
    count = len(prefix)
    if count > len(full):
        return None
    if list(prefix) == list(full[:count]):
        return count
    if count > 1 and prefix[-1] == terminator and list(prefix[:-1]) == list(full[: count - 1]):
        return count - 1
    return None


def _prefix_end(renderer: Renderer, prefix: str, text: str, tokens: Tokens, count: int) -> int:
    end = _end_at_special_token(renderer, len(prefix), tokens) if text.startswith(prefix) else None
    if end is None:
        prefix_ids = renderer.tokenise(prefix).ids
        end = shared_prefix_length(prefix_ids.tolist(), tokens.ids.tolist(), renderer.eos_token_id)
    if end is None:
        raise SourceError(
            f"the chat template rewrites earlier turns: the first {count} messages alone do not give the tokens that "
            "the whole conversation begins with, so its assistant messages cannot be located; "
            "use a template with {% generation %} tags"
        )
    return end


def _end_at_special_token(renderer: Renderer, boundary: int, tokens: Tokens) -> int | None:
    """Return the number of tokens before a place in the text, if a special token begins or ends exactly there.

    Such a token is found before the text around it is tokenised, so the text up to it has the same tokens alone as
    in the whole; anywhere else (None) that must be tried.
    """
    if tokens.starts is None or tokens.ends is None:
        return None
    index = int(np.searchsorted(tokens.starts, boundary))
    if index < len(tokens.ids) and tokens.starts[index] == boundary and renderer.isolates(int(tokens.ids[index])):
        return index
    if index > 0 and tokens.ends[index - 1] == boundary and renderer.isolates(int(tokens.ids[index - 1])):
        return index
    return None
