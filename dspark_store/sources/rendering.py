"""A tokenizer and its chat template as one thing: conversations to text, text to tokens."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.messages import Message, fold_system_message
from dspark_store.sources.source import SourceError
from dspark_store.sources.template import (
    RENDER_ERRORS,
    has_generation_tags,
    refuses_system_role,
    require_chat_template,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a text, none added and none cut.

    Attributes:
        ids: int32, shape (length,).
        starts: int64, shape (length,): where in the text each token begins, in characters; None if the tokenizer
            cannot tell (it has no fast backend).
        ends: int64, shape (length,): where it ends; None as above.

    """

    ids: NDArray[np.int32]
    starts: NDArray[np.int64] | None
    ends: NDArray[np.int64] | None


class Renderer:
    """Renders conversations with the tokenizer's chat template and tokenises the result."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Look at the template once.

        Raises:
            SourceError: the tokenizer has no chat template, or it is not valid Jinja.

        """
        require_chat_template(tokenizer)
        self.tokenizer = tokenizer
        self._apply: Any = tokenizer.apply_chat_template  # annotated for messages of strings only
        self.has_offsets = bool(tokenizer.is_fast)
        self.eos_token_id: int | None = tokenizer.eos_token_id if isinstance(tokenizer.eos_token_id, int) else None
        tagged = has_generation_tags(self._template(None))
        if tagged and not self.has_offsets:
            logger.warning(
                "%s has no fast backend, so the template's generation tags cannot be mapped to tokens; "
                "assistant messages are supervised with their headers",
                type(tokenizer).__name__,
            )
        self._folds_system_message = refuses_system_role(tokenizer)
        self._isolating_ids = _isolating_ids(tokenizer)

    def prepare(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages as the template can take them: a system message it refuses goes to the first user."""
        return fold_system_message(messages) if self._folds_system_message else list(messages)

    def supervises_by_tags(self, tools: list[JsonValue] | None) -> bool:
        """Tell whether `tokenise_tagged` works for conversations with these tools."""
        return self.has_offsets and has_generation_tags(self._template(tools))

    def render(self, messages: Sequence[Message], tools: list[JsonValue] | None) -> str:
        """Return the text of a conversation; "" for no messages.

        Raises:
            SourceError: the template refuses the conversation, or the text is not Unicode that can be encoded.

        """
        if not messages:
            return ""
        try:
            text: str = self._apply(list(messages), tools=tools, tokenize=False)
        except RENDER_ERRORS as error:
            raise SourceError(f"the chat template refuses the conversation: {_one_line(error)}") from error
        return _encodable(text)

    def tokenise(self, text: str) -> Tokens:
        """Tokenise a rendered text."""
        encoded: Any = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=self.has_offsets, verbose=False
        )
        return _tokens(encoded["input_ids"], encoded["offset_mapping"] if self.has_offsets else None)

    def tokenise_tagged(
        self, messages: Sequence[Message], tools: list[JsonValue] | None
    ) -> tuple[Tokens, NDArray[np.uint8]]:
        """Render and tokenise, and return also the mask (1 inside the template's generation tags)."""
        try:
            encoded = self._apply(
                list(messages),
                tools=tools,
                return_dict=True,
                return_assistant_tokens_mask=True,
                tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
            )
        except RENDER_ERRORS as error:
            raise SourceError(f"the chat template refuses the conversation: {_one_line(error)}") from error
        return (
            _tokens(encoded["input_ids"], encoded["offset_mapping"]),
            np.asarray(encoded["assistant_masks"], dtype=np.uint8),
        )

    def isolates(self, token_id: int) -> bool:
        """Tell whether this token cuts the text around it into parts that are tokenised independently."""
        return token_id in self._isolating_ids

    def _template(self, tools: list[JsonValue] | None) -> str:
        try:
            return self.tokenizer.get_chat_template(tools=tools)  # type: ignore[arg-type]  # JSON schemas, not bare dicts
        except ValueError as error:
            raise SourceError(f"no chat template for this use: {_one_line(error)}") from error


def _isolating_ids(tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """Return the ids of special tokens that are found in the text before anything else and take exactly their text."""
    if tokenizer.split_special_tokens:
        return frozenset()
    return frozenset(
        token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
    )


def _tokens(ids: list[int], offsets: list[tuple[int, int]] | None) -> Tokens:
    input_ids = np.asarray(ids, dtype=np.int32)
    if offsets is None:
        return Tokens(input_ids, None, None)
    pairs = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    return Tokens(input_ids, pairs[:, 0], pairs[:, 1])


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SourceError(f"character {error.start} of the rendered text is half of a surrogate pair") from error
    return text


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
