"""The loss mask: which tokens of a conversation the assistant said."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_store.sources.messages import Conversation
from dspark_store.sources.reasoning import reasoning_spans, tokens_in_spans
from dspark_store.sources.rendering import Renderer, Span, Tokens
from dspark_store.sources.turns import assistant_spans


@dataclass(frozen=True, slots=True)
class MaskOptions:
    """What of an assistant message is not supervised.

    Attributes:
        reasoning: its reasoning.
        headers: its role header, where the template has no generation tags (tags leave it out anyway).

    """

    reasoning: bool = False
    headers: bool = False


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a conversation, and the stretches of it that are supervised, and those inside them that are not."""

    text: str
    supervised: list[Span]
    masked: list[Span]
    warnings: list[str]


def render_with_spans(renderer: Renderer, conversation: Conversation, options: MaskOptions) -> Rendered:
    """Render a conversation and find what the assistant said.

    With a template that has generation tags, what stands inside them is supervised. With any other, each assistant
    message is, from the end of the text before it to the end of its own text: its header and closing too.

    Raises:
        SourceError: the template refuses the conversation, or an assistant message cannot be located.

    """
    messages, tools, variables = (
        renderer.prepare(conversation.messages),
        conversation.tools,
        conversation.template_kwargs,
    )
    if renderer.supervises_by_tags(tools):
        text, supervised = renderer.render_tagged(messages, tools, variables)
    else:
        text = renderer.render(messages, tools, variables)
        supervised = assistant_spans(renderer, messages, tools, text, mask_headers=options.headers)
    masked: list[Span] = []
    warnings: list[str] = []
    if options.reasoning:
        masked = reasoning_spans(
            lambda changed: renderer.render(changed, tools, variables), messages, text, warnings.append
        )
    return Rendered(text, supervised, masked, warnings)


def loss_mask(renderer: Renderer, rendered: Rendered, tokens: Tokens) -> NDArray[np.uint8]:
    """Return the mask of the text's tokens, uint8, shape (length,).

    A token that is partly in a stretch counts as in it, for what is supervised as for what is masked.
    """
    mask = tokens_in_spans(renderer, rendered.text, tokens, rendered.supervised)
    if rendered.masked:
        mask &= ~tokens_in_spans(renderer, rendered.text, tokens, rendered.masked)
    return mask.view(np.uint8)


def tokens_and_mask(
    renderer: Renderer, conversation: Conversation, options: MaskOptions = MaskOptions()
) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Return the ids and the loss mask of a whole conversation, not truncated; SourceError as `render_with_spans`."""
    rendered = render_with_spans(renderer, conversation, options)
    (tokens,) = renderer.tokenise([rendered.text])
    return tokens.ids, loss_mask(renderer, rendered, tokens)
