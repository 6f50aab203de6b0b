"""Where messages begin in a rendered conversation, by the renders of its first messages alone."""

from collections.abc import Sequence

from dspark_store.sources.marks import REASONING_FIELDS
from dspark_store.sources.messages import Message
from dspark_store.sources.rendering import Rendering, RenderLimitError
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
